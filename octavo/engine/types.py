"""The core nouns: what is asked (`SamplingParams`, `Request`) and what comes back (`TokenEvent`). No torch.

They travel between processes as msgpack; a field that is filled in later says by whom.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import InvalidRequest

MAX_STOP_STRINGS = 64
MAX_CHOICES = 128
SEED_BITS = 63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens; names and defaults are vLLM's. `verify` checks the ranges.

    `seed` is drawn at admission when None. `logprobs` is the number of best tokens to report beside the chosen one (0:
    only the chosen one). Stop strings are matched by the API process, where text exists; token ids by the engine.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value: Any = getattr(self, name)
            if value is None or isinstance(value, (str, list)):  # what else is no tuple, `admission.typed` refuses
                one = (value,) if isinstance(value, str) else tuple(value or ())
                msgspec.structs.force_setattr(self, name, one)
        if self.top_k == -1:
            msgspec.structs.force_setattr(self, "top_k", 0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def verify(self, vocab_size: int, max_logprobs: int) -> None:
        """Raises InvalidRequest naming the parameter, its value and its limit."""
        _within("n", self.n, 1, MAX_CHOICES)
        _within("temperature", self.temperature, 0, 100)
        if not 0 < self.top_p <= 1:
            raise _out_of_range("top_p", self.top_p, "above 0, at most 1")
        _within("top_k", self.top_k, 0, (1 << 31) - 1)
        _within("min_p", self.min_p, 0, 1)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        if not 0 < self.repetition_penalty <= 100:
            raise _out_of_range("repetition_penalty", self.repetition_penalty, "above 0, at most 100")
        if self.seed is not None:
            _within("seed", self.seed, -(1 << SEED_BITS), (1 << SEED_BITS) - 1)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, (1 << 31) - 1)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _within(name, value, 0, min(max_logprobs, vocab_size))
        _within("stop", len(self.stop), 0, MAX_STOP_STRINGS, "strings")
        if any(not s for s in self.stop):
            raise InvalidRequest("stop holds an empty string", fix="remove it", param="stop")
        for token in self.stop_token_ids:
            _within("stop_token_ids", token, 0, vocab_size - 1)
        if self.greedy and self.n > 1:
            raise InvalidRequest(
                f"n is {self.n} with temperature 0: the choices would all be equal", limit="n=1 when greedy",
                fix="raise temperature or set n to 1", param="n",
            )  # fmt: skip


def _within(name: str, value: float, low: float, high: float, unit: str = "") -> None:
    if not low <= value <= high:
        raise _out_of_range(name, value, f"{low} to {high}{' ' + unit if unit else ''}")


def _out_of_range(name: str, value: float, limit: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value}", limit=limit, fix=f"set {name} within it", param=name)


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


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Logprobs at one position: the chosen (or given) token first, then the best ones in order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """of the chosen token; 1 is best"""


class TokenEvent(msgspec.Struct, omit_defaults=True):
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
    """stop, length, abort or error"""
    stop_reason: int | None = None
    """the stop token id, when it is one of `stop_token_ids`; None for an end-of-sequence token"""
    error: dict[str, Any] | None = None
    """`errors.to_wire` of the cause when `finish_reason` is error"""
