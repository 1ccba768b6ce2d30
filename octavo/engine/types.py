"""The core nouns: what is asked (`SamplingParams`, `Request`) and what comes back (`TokenEvent`). No torch.

They travel between processes as msgpack; a field that is filled in later says by whom.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from octavo.engine.param_checks import (
    above,
    at_most,
    count_of_logprobs,
    holds_within,
    known_tokens,
    out_of_range,
    within,
)
from octavo.errors import InvalidRequest

MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PATTERN_SIZE = 1024
MAX_CHOICES = 128
MAX_COUNT = (1 << 31) - 1
WITHOUT_BEAMS = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "stop", "min_tokens", "thinking_token_budget", "repetition_detection", "prompt_logprobs", "logprob_token_ids",
    "stream_interval", "structured_outputs",
)  # fmt: skip
"""parameters that beam search does not look at, and so refuses"""
SEED_BITS = 63
LEAST_TEMPERATURE = 0.01
"""a lower one but 0 is raised to it, as in vLLM: there it differs from 0 by rounding only"""


class RequestOutputKind(Enum):
    """What an iterator of `AsyncLLM.generate` gives; names and numbers are vLLM's."""

    CUMULATIVE = 0
    """all of the output so far, again and again"""
    DELTA = 1
    """only what is new"""
    FINAL_ONLY = 2
    """nothing but the whole at the end"""


class RepetitionDetectionParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Ends an output whose last tokens are one pattern again and again, `min_count` times at least.

    Patterns are `min_pattern_size` (0: 1) to `max_pattern_size` (0: none is looked for) tokens long.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def verify(self) -> None:
        """Raises InvalidRequest."""
        name = "repetition_detection"
        within(f"{name}.max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE, "tokens")
        within(f"{name}.min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size, "(max_pattern_size)")
        if self.max_pattern_size:
            within(f"{name}.min_count", self.min_count, 2, MAX_COUNT)


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What the answer must be: exactly one of the first five. Names are vLLM's; `structured.Grammars` checks it."""

    json: str | dict[str, Any] | bool | None = None
    """a JSON schema, which the answer then fits"""
    json_object: bool = False
    regex: str | None = None
    """in Rust's syntax; it matches the whole answer"""
    grammar: str | None = None
    """in llguidance's kind of Lark, or in GBNF"""
    choice: tuple[str, ...] | None = None
    disable_any_whitespace: bool = False
    """JSON without white space between its parts"""
    disable_additional_properties: bool = False
    """as though `additionalProperties` were false in schemas that list properties and do not say"""
    whitespace_pattern: str | None = None
    """a regex of the white space between JSON's parts"""

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens; names and defaults are vLLM's. `verify` checks the ranges.

    `seed` is drawn at admission when None. `logprobs` is the number of best tokens to report beside the chosen one (0:
    only the chosen one; -1: all of the vocabulary), `logprob_token_ids` names them instead. Stop strings are matched by
    the API process, where text exists; token ids by the engine. What `constraints` and `admission` say of the others
    holds for `bad_word_ids` and `thinking_marks` too: those are filled in by admission, from `bad_words` and for
    `thinking_token_budget`.
    """

    n: int = 1
    best_of: int | None = None
    """so many choices are generated, of which the `n` with the highest cumulative logprob are given"""
    use_beam_search: bool = False
    """the likeliest answers, of `best_of` (or `n`) beams; what chooses at random has no effect then"""
    length_penalty: float = 1.0
    """of beam search: how much a longer answer is preferred"""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    """before so many there is no end-of-sequence token, no stop token id and no stop string"""
    thinking_token_budget: int | None = None
    """tokens of thinking, after which its end is forced; None or -1: no limit"""
    repetition_detection: RepetitionDetectionParams | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    detokenize: bool = True
    """False: the output has token ids but no text"""
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    spaces_between_special_tokens: bool = True
    """no effect: special tokens are written as they are, and nothing is ever put between them"""
    truncate_prompt_tokens: int | None = None
    """a longer prompt is cut to so many tokens; -1: to what the context holds"""
    truncation_side: str = "left"
    """where it is cut: left (the last tokens stay) or right"""
    stream_interval: int | None = None
    """tokens of a choice that are given at once, but for the first and the last"""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    thinking_marks: tuple[int, int] | None = None
    """the tokens that start and end thinking"""

    def __post_init__(self) -> None:
        change = msgspec.structs.force_setattr
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids"):
            value: Any = getattr(self, name)
            if isinstance(value, str):
                change(self, name, (value,))
            elif isinstance(value, (list, tuple)):  # what else is no tuple, `admission.typed` refuses
                change(self, name, tuple(value))
            elif value is None and name in ("stop", "stop_token_ids", "bad_words"):
                change(self, name, ())
        if isinstance(self.logit_bias, dict):
            change(self, "logit_bias", {_token_id(token): bias for token, bias in self.logit_bias.items()})
        for name, unset, plain in (("top_k", -1, 0), ("seed", -1, None), ("thinking_token_budget", -1, None)):
            if getattr(self, name) == unset:
                change(self, name, plain)

        if isinstance(self.temperature, float) and 0 < self.temperature < LEAST_TEMPERATURE:
            change(self, "temperature", LEAST_TEMPERATURE)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def num_choices(self) -> int:
        """How many are generated."""
        return self.n if self.best_of is None else self.best_of

    def num_logprobs(self, vocab_size: int) -> int | None:
        """How many of the best tokens are reported beside the chosen one; None without logprobs."""
        if self.logprob_token_ids is not None:
            return 0
        return vocab_size if self.logprobs == -1 else self.logprobs

    def num_prompt_logprobs(self, vocab_size: int) -> int | None:
        return vocab_size if self.prompt_logprobs == -1 else self.prompt_logprobs

    def verify(self, vocab_size: int, max_logprobs: int) -> None:
        """Raises InvalidRequest naming the parameter, its value and its limit."""
        within("n", self.n, 1, MAX_CHOICES)
        self._verify_choice(vocab_size)
        self._verify_end(vocab_size)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                count_of_logprobs(name, count, vocab_size, max_logprobs)
        if self.logprob_token_ids is not None:
            holds_within("logprob_token_ids", self.logprob_token_ids, 1, MAX_LOGPROB_TOKEN_IDS, "token ids")
            known_tokens("logprob_token_ids", self.logprob_token_ids, vocab_size)
            if self.logprobs not in (None, len(self.logprob_token_ids)):
                raise out_of_range("logprobs", self.logprobs, "with logprob_token_ids: none, or as many as these")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            within("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_COUNT, "tokens, or -1")
        if self.truncation_side not in ("left", "right"):
            raise out_of_range("truncation_side", self.truncation_side, "left or right")
        if self.stream_interval is not None:
            within("stream_interval", self.stream_interval, 1, MAX_COUNT)
        self._verify_beams(vocab_size)
        if self.greedy and self.num_choices > 1 and not self.use_beam_search:
            name, count = ("n", self.n) if self.best_of is None else ("best_of", self.best_of)
            raise InvalidRequest(
                f"{name} is {count} with temperature 0: the choices would all be equal", limit=f"{name}=1 when greedy",
                fix=f"raise temperature or set {name} to 1", param=name,
            )  # fmt: skip

    def _verify_choice(self, vocab_size: int) -> None:
        """How a token is chosen."""
        if self.best_of is not None:
            within("best_of", self.best_of, self.n, MAX_CHOICES)
        within("temperature", self.temperature, 0, 100)
        above("top_p", self.top_p, 0, 1)
        within("top_k", self.top_k, 0, MAX_COUNT)
        within("min_p", self.min_p, 0, 1)
        within("presence_penalty", self.presence_penalty, -2, 2)
        within("frequency_penalty", self.frequency_penalty, -2, 2)
        above("repetition_penalty", self.repetition_penalty, 0, 100)
        if self.seed is not None:
            within("seed", self.seed, -(1 << SEED_BITS), (1 << SEED_BITS) - 1)
        if self.logit_bias is not None:
            at_most("logit_bias", self.logit_bias, MAX_LOGIT_BIAS, "token ids")
            known_tokens("logit_bias", self.logit_bias, vocab_size)
            for bias in self.logit_bias.values():
                within("logit_bias", bias, -100, 100)
        if self.allowed_token_ids is not None:
            holds_within("allowed_token_ids", self.allowed_token_ids, 1, vocab_size, "token ids")
            known_tokens("allowed_token_ids", self.allowed_token_ids, vocab_size)
        at_most("bad_words", self.bad_words, MAX_BAD_WORDS, "words")
        if any(not word for word in self.bad_words):
            raise InvalidRequest("bad_words holds an empty string", fix="remove it", param="bad_words")
        for word in self.bad_word_ids:
            known_tokens("bad_words", word, vocab_size)
        if self.thinking_token_budget is not None:
            within("thinking_token_budget", self.thinking_token_budget, 0, MAX_COUNT, "tokens, or -1")

    def _verify_beams(self, vocab_size: int) -> None:
        within("length_penalty", self.length_penalty, -10, 10)
        if not self.use_beam_search:
            if self.length_penalty != 1:
                raise out_of_range("length_penalty", self.length_penalty, "1 without use_beam_search")
            return
        within(
            "n" if self.best_of is None else "best_of", self.num_choices, 1, vocab_size // 2, "(half the vocabulary)"
        )
        if self.logprobs == -1:
            raise out_of_range("logprobs", self.logprobs, "with use_beam_search: 0 or more")
        plain = SamplingParams()
        for name in WITHOUT_BEAMS:
            if getattr(self, name) != getattr(plain, name):
                raise InvalidRequest(f"{name} does not go with use_beam_search", fix="leave it out", param=name)

    def _verify_end(self, vocab_size: int) -> None:
        """When an answer is complete."""
        if self.max_tokens is not None:
            within("max_tokens", self.max_tokens, 1, MAX_COUNT)
        within("min_tokens", self.min_tokens, 0, MAX_COUNT if self.max_tokens is None else self.max_tokens)
        at_most("stop", self.stop, MAX_STOP_STRINGS, "strings")
        if any(not s for s in self.stop):
            raise InvalidRequest("stop holds an empty string", fix="remove it", param="stop")
        if self.stop and not self.detokenize:
            raise InvalidRequest(
                "stop is set with detokenize false", limit="stop strings need text", fix="set detokenize to true",
                param="stop",
            )  # fmt: skip
        at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "token ids")
        known_tokens("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.repetition_detection is not None:
            self.repetition_detection.verify()


def _token_id(name: Any) -> Any:
    """Keys of a JSON object are texts."""
    try:
        return int(name) if isinstance(name, str) else name
    except ValueError:
        return name


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One validated request, as the engine receives it; it becomes `sampling.n` sequences.

    `output_token_ids` holds, a list for each choice, tokens generated elsewhere already: generation goes on after
    them. The engine does not look into `multimodal`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    client_id: str = ""
    """set by the engine from the connection the request came on"""
    arrival_time: float = 0.0
    """seconds since the epoch, set by the API process"""
    output_token_ids: list[list[int]] = []
    priority: int = 0
    """lower is served earlier"""
    deadline: float | None = None
    """seconds since the epoch, after which nobody waits for the answer"""
    adapter: str | None = None
    cache_salt: str | None = None
    trace_context: dict[str, str] | None = None
    multimodal: bytes | None = None


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Logprobs at one position: the chosen (or given) token first, then the best ones in order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """of the chosen token; 1 is best"""


class TokenEvent(msgspec.Struct, omit_defaults=True, gc=False):
    """News of one choice. Exactly one event of a choice has a `finish_reason`, and it is the last."""

    request_id: str
    choice: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """one for each of `token_ids`, when asked for"""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """of the prompt (first is None), once, before or with the first token"""
    cached_tokens: int = 0
    """of the prompt, not computed for this choice; with its first token"""
    finish_reason: str | None = None
    """stop, length, repetition, abort or error"""
    stop_reason: int | str | None = None
    """the stop token id, when it is one of `stop_token_ids`, or "repetition_detected"; None for an end-of-sequence
    token"""
    error: dict[str, Any] | None = None
    """`errors.to_wire` of the cause when `finish_reason` is error"""
