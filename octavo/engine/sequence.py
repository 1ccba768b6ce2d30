"""One choice of a request on its way: what is known, what is computed, and which blocks it holds. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.pages import BlockTables
from octavo.engine.plan import Chunk, NewSequence
from octavo.engine.types import Request, TokenLogprobs


@dataclass(eq=False)
class Sequence:
    """The scheduler computes until `num_computed_tokens` has caught up with `num_tokens`, then a token is sampled."""

    sequence_id: int
    request: Request
    choice: int
    seed: int
    held: BlockTables
    queued_time: float
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    first_scheduled_time: float | None = None
    """seconds since the epoch, set by the first plan that holds it"""
    known_to_runners: bool = False
    """set by commit; False again after preemption"""
    blocks_sent: list[int] = field(default_factory=list)
    """for each KV group, how much of the table the runners have; set by commit"""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """as far as computed; None when not asked for or already reported"""

    def __post_init__(self) -> None:
        self.blocks_sent = [0] * len(self.held.tables)

    @property
    def key(self) -> tuple[int, int]:
        """Smaller is served earlier; the largest is preempted first."""
        return (self.request.priority, self.sequence_id)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_carried_tokens(self) -> int:
        """Output tokens that came with the request."""
        return len(self.request.output_token_ids[self.choice]) if self.request.output_token_ids else 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Prompt, then output, of positions `start` to `end` (exclusive)."""
        prompt = self.num_prompt_tokens
        if start >= prompt:
            return self.output_token_ids[start - prompt : end - prompt]
        return self.request.prompt_token_ids[start:end] + self.output_token_ids[: max(0, end - prompt)]

    def chunk(self, length: int) -> Chunk:
        start, end = self.num_computed_tokens, self.num_computed_tokens + length
        new = tuple(table[sent:] for table, sent in zip(self.held.tables, self.blocks_sent, strict=True))
        wants_logprobs = self.prompt_logprobs is not None and start < self.num_prompt_tokens - 1
        return Chunk(
            self.sequence_id, start, self.token_ids(start, end), tuple(self.blocks_sent), new,
            end == self.num_tokens, wants_logprobs,
        )  # fmt: skip

    def introduction(self) -> NewSequence:
        return NewSequence(
            self.sequence_id, self.choice, self.seed, self.request.sampling, self.request.prompt_token_ids,
            self.output_token_ids,
        )  # fmt: skip

    def computed(self, chunk: Chunk) -> None:
        """Takes note that the runners have done `chunk`."""
        assert chunk.start == self.num_computed_tokens, "a chunk was committed out of order"
        self.num_computed_tokens = chunk.end
        self.known_to_runners = True
        for group, new in enumerate(chunk.new_blocks):
            if new:
                self.blocks_sent[group] = chunk.first_new_block[group] + len(new)

    def start_over(self) -> None:
        """After its blocks were taken away: all of it is computed again."""
        self.num_computed_tokens = 0
        self.known_to_runners = False
        self.blocks_sent = [0] * len(self.held.tables)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = []
