"""Which requests can be served as they stand: limits of the model checked before the engine hears of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.engine.param_checks import at_most, within
from octavo.engine.text_work import Cut
from octavo.engine.types import MAX_BAD_WORDS, RequestOutputKind, SamplingParams
from octavo.errors import BadModelFile, InvalidRequest
from octavo.text.tokenizer import Tokenizer

DEFAULTS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
"""keys of a model's generation_config.json that become default sampling parameters, as in vLLM"""

MAX_BAD_WORD_TOKENS = 1024
LONGEST_SHOWN = 80
USUAL_LOGPROBS = 20
MAX_LOGPROB_ENTRIES = 1 << 22
"""logprobs of one choice, or of a prompt, beyond `USUAL_LOGPROBS` a token: some 300 MB in each process"""
THINKING_MARKS = (
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)  # fmt: skip
"""tokens between which models think: Qwen's and DeepSeek's, Mistral's, Seed's, Cohere's"""


def default_params(generation_config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """What a request that says nothing gets. Raises BadModelFile for what are no valid parameters."""
    named = {ours: generation_config.get(theirs) for theirs, ours in DEFAULTS.items()}
    params = {name: value for name, value in named.items() if value is not None}
    try:
        typed(SamplingParams(**params)).verify(vocab_size, vocab_size)
    except InvalidRequest as err:
        raise BadModelFile(
            f"generation_config.json: {err.cause}", limit=err.limit, fix="correct it, or use --generation-config vllm"
        ) from err
    return params


def typed(params: SamplingParams) -> SamplingParams:
    """The same with every value of its declared type. Raises InvalidRequest naming the one that is not."""
    values = msgspec.structs.asdict(params)
    for name, value in values.items():
        if isinstance(value, msgspec.Struct):
            values[name] = msgspec.structs.asdict(value)
        elif isinstance(value, RequestOutputKind):
            values[name] = value.value
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as err:
        what, _, where = str(err).partition(" - at ")
        name = (re.findall(r"\$\.([\w.]+)", where) or ["sampling_params"])[0]
        found: Any = values
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        value = repr(found)
        shown = value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]}…"
        raise InvalidRequest(f"{name} is {shown}", limit=what.lower(), fix=f"correct {name}", param=name) from None


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int, name: str) -> None:
    """Raises InvalidRequest for an empty prompt, unknown tokens, or no room for one more token."""
    count = len(token_ids)
    if not count:
        raise InvalidRequest(f"{name} holds no token", limit="at least 1", fix="send some text", param=name)
    if count >= max_model_len:  # first, as the next look takes in all of them
        raise InvalidRequest(
            f"{name} has {count} tokens", limit=f"{max_model_len} tokens of context, one of them for the answer",
            fix=f"shorten {name}", param=name,
        )  # fmt: skip
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            f"{name} holds token id {wrong}", limit=f"0 to {vocab_size - 1}", fix="use this model's tokenizer",
            param=name,
        )  # fmt: skip


def fit_max_tokens(params: SamplingParams, prompt_tokens: int, max_model_len: int, asked: bool) -> SamplingParams:
    """With `max_tokens` set to what fits. Raises InvalidRequest when the caller asked for more than that."""
    room = max_model_len - prompt_tokens
    wanted = params.max_tokens
    if asked and wanted is not None and wanted > room:
        raise InvalidRequest(
            f"max_tokens is {wanted} after {prompt_tokens} tokens of prompt, {prompt_tokens + wanted} in all",
            limit=f"{max_model_len} tokens of context", fix=f"set max_tokens to {room} or less", param="max_tokens",
        )  # fmt: skip
    max_tokens = room if wanted is None else min(wanted, room)
    within("min_tokens", params.min_tokens, 0, max_tokens, "(max_tokens)")
    return msgspec.structs.replace(params, max_tokens=max_tokens)


def check_logprobs(params: SamplingParams, prompt_tokens: int, vocab_size: int) -> None:
    """Raises InvalidRequest for more than either process could hold; `params` have their `max_tokens`."""
    of_prompt, of_each = params.num_prompt_logprobs(vocab_size), params.num_logprobs(vocab_size)
    asked = (("prompt_logprobs", of_prompt, prompt_tokens), ("logprobs", of_each, params.max_tokens or 0))
    for name, count, tokens in asked:
        if count is not None and count > USUAL_LOGPROBS and count * tokens > MAX_LOGPROB_ENTRIES:
            raise InvalidRequest(
                f"{name} asks for {count} logprobs at each of {tokens} tokens", limit=f"{MAX_LOGPROB_ENTRIES} in all",
                fix=f"lower {name} or the number of tokens", param=name,
            )  # fmt: skip


def cut_of(params: SamplingParams, max_model_len: int) -> Cut | None:
    """How `truncate_prompt_tokens` shortens a prompt; None if not at all. Raises InvalidRequest.

    -1 leaves room for `max_tokens`, or for one token where that is not given.
    """
    keep = params.truncate_prompt_tokens
    if keep is None:
        return None
    if keep == -1:
        keep = max(1, max_model_len - (params.max_tokens or 1))
    within("truncate_prompt_tokens", keep, 1, max_model_len, "tokens, or -1")
    return Cut(keep, params.truncation_side)


def with_token_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """With what the engine needs to know of texts: the tokens of bad words, and those that start and end thinking.

    Raises InvalidRequest for a bad word that has no tokens, or a thinking budget where the model has no marks.
    """
    words = tuple(word for text in params.bad_words for word in _bad_word_ids(text, tokenizer))
    at_most("bad_words", words, MAX_BAD_WORDS, "token sequences (each word alone and after a space)")
    at_most("bad_words", [token for word in words for token in word], MAX_BAD_WORD_TOKENS, "tokens")
    marks = None if params.thinking_token_budget is None else _thinking_marks(tokenizer)
    if params.thinking_token_budget is not None and marks is None:
        raise InvalidRequest(
            f"thinking_token_budget is {params.thinking_token_budget}, and this model has no tokens for thinking",
            limit=" or ".join(start for start, _ in THINKING_MARKS), fix="leave it out", param="thinking_token_budget",
        )  # fmt: skip
    if marks is not None and params.structured_outputs is not None:
        raise InvalidRequest(
            f"thinking_token_budget is {params.thinking_token_budget} with structured output", limit="one of the two",
            fix="leave one out, as the grammar holds from the first token on", param="thinking_token_budget",
        )  # fmt: skip
    return msgspec.structs.replace(params, bad_word_ids=words, thinking_marks=marks)


def _bad_word_ids(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The word as it stands first, and as it stands after a space.

    vLLM leaves the second away where it has another number of tokens, and so lets most such words pass.
    """
    if len(word) > MAX_BAD_WORD_TOKENS * 4:
        raise InvalidRequest(
            f"bad_words holds a word of {len(word)} characters", limit=f"{MAX_BAD_WORD_TOKENS * 4}",
            fix="shorten it", param="bad_words",
        )  # fmt: skip
    first, spaced = (tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " "))
    if not first:
        raise InvalidRequest(f"bad_words holds {word!r}, which has no token", fix="remove it", param="bad_words")
    return list(dict.fromkeys((first, spaced)))


def _thinking_marks(tokenizer: Tokenizer) -> tuple[int, int] | None:
    for start, end in THINKING_MARKS:
        marks = tokenizer.token_id(start), tokenizer.token_id(end)
        if marks[0] is not None and marks[1] is not None:
            return marks[0], marks[1]
    return None


def for_engine(params: SamplingParams) -> SamplingParams:
    """As the engine knows it: every choice that is generated is one that is given."""
    if params.use_beam_search:
        return params
    if params.best_of is None or params.best_of == params.n:
        return msgspec.structs.replace(params, best_of=None)
    logprobs = 0 if params.num_logprobs(1) is None else params.logprobs
    return msgspec.structs.replace(params, n=params.best_of, best_of=None, logprobs=logprobs)


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The error as it reads for a caller who knows the parameter by another name."""
    name = names.get(error.param or "")
    if name is None or error.param is None:
        return error
    cause = error.cause.replace(error.param, name, 1)
    fix = error.fix and error.fix.replace(error.param, name)
    return type(error)(cause, limit=error.limit, fix=fix, param=name)
