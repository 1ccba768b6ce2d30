"""What may enter the scheduler: checks of a request, and limits on how much may wait. No torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from octavo.engine.noise import DRAW_SEED, noise_key
from octavo.engine.pages import KVBlocks
from octavo.engine.types import SEED_BITS, Request
from octavo.errors import InvalidRequest, Overloaded

MAX_WAITING = 16384
"""sequences waiting, beyond which new requests are refused"""
RATE_TOKENS = 4096
"""prompt tokens that have started, over which their speed is taken"""
LONGEST_RETRY_S = 60

Name = tuple[str, str]
"""(client id, request id)"""


class Queue:
    """Requests of which no choice has started yet: how many, of how many prompt tokens, and how fast they start."""

    def __init__(self, max_requests: int | None, max_tokens: int | None) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.rejected: Counter[str] = Counter()
        """requests refused, by the limit that refused them"""
        self._waiting: dict[Name, int] = {}
        self._tokens = 0
        self._since = 0.0
        self._started = 0
        self._tokens_per_s = 0.0

    def check(self, num_waiting: int, request: Request) -> None:
        """Raises Overloaded when `request` would wait behind too much. An empty queue takes any request."""
        count, tokens = len(self._waiting), self._tokens
        if num_waiting + request.sampling.n > MAX_WAITING:
            self._reject("max_waiting", f"{num_waiting} sequences are waiting", MAX_WAITING)
        if self.max_requests is not None and count >= self.max_requests:
            self._reject("max_num_queued_reqs", f"{count} requests are waiting", self.max_requests)
        total = tokens + len(request.prompt_token_ids)
        if self.max_tokens is not None and count and total > self.max_tokens:
            self._reject("max_num_queued_tokens", f"{total} prompt tokens would be waiting", self.max_tokens)

    def _reject(self, reason: str, cause: str, limit: int) -> None:
        self.rejected[reason] += 1
        flag = "" if reason == "max_waiting" else f" (--{reason.replace('_', '-')})"
        wait = min(LONGEST_RETRY_S, max(1, round(self._tokens / self._tokens_per_s))) if self._tokens_per_s else 1
        raise Overloaded(cause, retry_after_s=wait, limit=f"{limit}{flag}", fix=f"try again in {wait} s")

    def add(self, name: Name, tokens: int) -> None:
        self._waiting[name] = tokens
        self._tokens += tokens

    def started(self, name: Name, now: float) -> None:
        """Its first choice was scheduled. Again is harmless."""
        if self._started == 0:
            self._since = now
        self._started += self.ended(name)
        if self._started >= RATE_TOKENS and now > self._since:
            self._tokens_per_s = self._started / (now - self._since)
            self._started = 0

    def ended(self, name: Name) -> int:
        """It waits no longer; gives its prompt tokens, 0 when it had left before."""
        tokens = self._waiting.pop(name, 0)
        self._tokens -= tokens
        return tokens

    def check_integrity(self) -> None:
        assert self._tokens == sum(self._waiting.values()), "queued tokens miscounted"


def check_request(request: Request, vocab_size: int, max_model_len: int, chunk: int, blocks: KVBlocks) -> None:
    """Raises InvalidRequest for what could never be served as it stands."""
    sampling, prompt, carried = request.sampling, request.prompt_token_ids, request.output_token_ids
    sampling.verify(vocab_size, vocab_size)
    if not prompt:
        raise InvalidRequest("the prompt is empty", limit="at least 1 token", fix="add text", param="prompt")
    if carried and sampling.use_beam_search:
        raise InvalidRequest("output_token_ids is set with use_beam_search", fix="leave it out")
    if carried and len(carried) != sampling.n:
        raise InvalidRequest(f"output_token_ids holds {len(carried)} choices", limit=f"n is {sampling.n}")
    for tokens in (prompt, *carried):
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            raise InvalidRequest(
                f"token id {min(tokens) if min(tokens) < 0 else max(tokens)} is outside the vocabulary",
                limit=f"0 to {vocab_size - 1}", fix="use this model's tokenizer", param="prompt",
            )  # fmt: skip
    longest = len(prompt) + max((len(tokens) for tokens in carried), default=0)
    if len(prompt) >= max_model_len or longest > max_model_len:
        raise InvalidRequest(
            f"the prompt is {longest} tokens long, which leaves no room to answer",
            limit=f"context of {max_model_len} tokens", fix="shorten it", param="prompt",
        )  # fmt: skip
    final = min(len(prompt) + (sampling.max_tokens or max_model_len), max_model_len)
    if not blocks.can_ever_hold(final - 1, chunk):
        raise InvalidRequest(
            f"{final} tokens (prompt and max_tokens) do not fit into the KV cache",
            limit=f"{blocks.num_blocks} blocks of {blocks.layout.page_size} tokens",
            fix="shorten the prompt or lower max_tokens", param="max_tokens",
        )  # fmt: skip


def seed_source(seed: int) -> Callable[[], int]:
    """Seeds of requests that bring none: from the system, or, for an engine with a seed, a fixed series."""
    counter = iter(range(1 << SEED_BITS))

    def draw() -> int:
        if seed == 0:
            return int.from_bytes(os.urandom(8), "little") >> (64 - SEED_BITS)
        return noise_key(seed, 0, next(counter), DRAW_SEED) >> (64 - SEED_BITS)

    return draw
