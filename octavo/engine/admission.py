"""Which requests can be served as they stand: limits of the model checked before the engine hears of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.engine.types import SamplingParams
from octavo.errors import BadModelFile, InvalidRequest

DEFAULTS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
"""keys of a model's generation_config.json that become default sampling parameters, as in vLLM"""


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
    try:
        return msgspec.convert(msgspec.structs.asdict(params), SamplingParams)
    except msgspec.ValidationError as err:
        what, _, where = str(err).partition(" - at ")
        name = where.strip("`").removeprefix("$.").split("[")[0] or "sampling_params"
        value = getattr(params, name, None)
        raise InvalidRequest(f"{name} is {value!r}", limit=what.lower(), fix=f"correct {name}", param=name) from None


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
    return msgspec.structs.replace(params, max_tokens=room if wanted is None else min(wanted, room))


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The error as it reads for a caller who knows the parameter by another name."""
    name = names.get(error.param or "")
    if name is None or error.param is None:
        return error
    cause = error.cause.replace(error.param, name, 1)
    fix = error.fix and error.fix.replace(error.param, name)
    return type(error)(cause, limit=error.limit, fix=fix, param=name)
