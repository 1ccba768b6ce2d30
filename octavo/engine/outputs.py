"""What callers of the Python API get. Names of classes and attributes are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from octavo.engine.types import SamplingParams, TokenLogprobs


@dataclass
class ChoiceDelta:
    """News of one choice since the last delta. The last one has a `finish_reason`.

    `text` lags behind `token_ids` while a character is incomplete or could be the start of a stop string.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """one for each of `token_ids`, when asked for"""
    finish_reason: str | None = None
    """stop, length, repetition or abort"""
    stop_reason: int | str | None = None
    """the stop string, or the stop token id; None for an end-of-sequence token"""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """one for each prompt token, once"""
    cached_tokens: int = 0
    """of the prompt, not computed for this choice; once"""


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One choice, as far as it has come."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """sum over the chosen tokens, when logprobs were asked for"""
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt with all its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """prompt tokens that were not computed, as their keys and values were in the cache"""


class OutputBuilder:
    """Puts deltas together into the request's output as far as it has come."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams,
        token_text: Callable[[int], str],
    ) -> None:  # fmt: skip
        choices = [CompletionOutput(index, "", []) for index in range(params.n)]
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, outputs=choices)
        self._token_text = token_text
        self._best = params.logprob_token_ids is None
        """the tokens reported beside the chosen one are the best ones, in order"""
        self._changed: set[int] = set()

    def add(self, deltas: Iterable[ChoiceDelta]) -> None:
        for delta in deltas:
            self._changed.add(delta.index)
            if delta.prompt_logprobs is not None:
                shown = [None if position is None else self._ranked(position) for position in delta.prompt_logprobs]
                self.output.prompt_logprobs = shown
            if delta.index == 0:
                self.output.num_cached_tokens += delta.cached_tokens
            self._extend(self.output.outputs[delta.index], delta)
        self.output.finished = all(choice.finished() for choice in self.output.outputs)

    def _extend(self, choice: CompletionOutput, delta: ChoiceDelta) -> None:
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs:
            chosen = sum(position.logprobs[0] for position in delta.logprobs)
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + chosen
            shown = [self._ranked(position, self._best) for position in delta.logprobs]
            choice.logprobs = (choice.logprobs or []) + shown

    def _ranked(self, position: TokenLogprobs, best: bool = True) -> dict[int, Logprob]:
        others = range(1, len(position.token_ids))
        ranks = [position.rank, *(others if best else [None] * len(others))]
        ranked: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(position.token_ids, position.logprobs, ranks, strict=True):
            ranked.setdefault(token_id, Logprob(logprob, rank, self._token_text(token_id)))
        return ranked

    def snapshot(self) -> RequestOutput:
        """A copy that later deltas do not change."""
        choices = [replace(choice, token_ids=list(choice.token_ids)) for choice in self.output.outputs]
        return replace(self.output, outputs=choices)

    def take(self) -> RequestOutput:
        """Only what is new since the last call, and only choices that have news."""
        news = self.snapshot()
        news.outputs = [choice for choice in news.outputs if choice.index in self._changed]
        self.output.prompt_logprobs = None
        for choice in self.output.outputs:
            choice.text, choice.token_ids, choice.logprobs = "", [], None
        self._changed.clear()
        return news
