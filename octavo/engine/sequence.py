"""One choice of a request on its way: what is known, planned and computed, and which blocks it holds. No torch.

    prompt tokens │ output tokens │ pending
    0 ……………… computed ……………… planned ……………… expected
      the runners have done it │ a step under way does it │ not yet in any plan

A step is planned while the one before runs, so the token which that one samples is pending: its place is known, it is
not. Steps run in the order of their plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.engine.adapters import LoadedAdapter
from octavo.engine.pages import BlockTables
from octavo.engine.plan import UNKNOWN, Chunk, NewSequence
from octavo.engine.prefix import ChainKeys
from octavo.engine.tiers import Fetch, Swapped
from octavo.engine.types import Request, TokenLogprobs

if TYPE_CHECKING:
    from octavo.engine.beams import BeamGroup


@dataclass(eq=False)
class Sequence:
    """The scheduler plans until planned has caught up with expected; then a token is sampled."""

    sequence_id: int
    request: Request
    choice: int
    seed: int
    held: BlockTables
    queued_time: float
    priority: int = 0
    """lower is served earlier; 0 for all when requests run first come, first served"""
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0
    pending: int = 0
    """steps under way that sample a token of this sequence: at most 1 when a plan is made, 2 while the step before it
    waits to be committed"""
    draft_token_ids: list[int] = field(default_factory=list)
    """guesses of the tokens to come, for the next chunk; set by commit"""
    drafting: bool = False
    """a chunk with drafts is under way: how many tokens it gives is not known"""
    epoch: int = 0
    """times that it started over; what a step computed in another epoch is gone"""
    swapped: Swapped | None = None
    """while it waits after a preemption: where what it had computed lies"""
    fetch: Fetch | None = None
    """blocks that it waits for, from the disk"""
    looked_on_disk: bool = False
    """has been asked for once, since it came or was preempted"""
    keys: ChainKeys | None = None
    """of its full blocks; None without a prefix cache"""
    num_cached_tokens: int = 0
    """of the prompt, that were not computed when it first started"""
    group: BeamGroup | None = None
    """of a beam: those that are searched together"""
    origin: Sequence | None = None
    """of a beam that has not started: the one that goes on from the same tokens but the last"""
    arrival: int = -1
    """the id whose place in the order it has: its own, or that of the beam it comes from"""
    first_scheduled_time: float | None = None
    """seconds since the epoch, set by the first plan that holds it"""
    known_to_runners: bool = False
    """set by the first plan since admission, preemption or a failed step"""
    blocks_sent: list[int] = field(default_factory=list)
    """for each KV group, how much of the table the plans have told"""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """as far as computed; None when not asked for or already reported"""
    adapter: LoadedAdapter | None = None
    """that which had the request's name for it when it came; None for the base model"""
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.blocks_sent = [0] * len(self.held.tables)
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        if self.arrival < 0:
            self.arrival = self.sequence_id

    @property
    def key(self) -> tuple[int, int, int]:
        """Smaller is served earlier; the largest is preempted first."""
        return (self.priority, self.arrival, self.sequence_id)

    @property
    def has_told(self) -> bool:
        """A beam that has told what may follow it: whether it goes on is decided for all of its group at once."""
        return self.group is not None and self in self.group.told

    @property
    def on_hold(self) -> bool:
        """A beam that has told, or is about to."""
        return self.group is not None and (self.pending > 0 or self in self.group.told)

    @property
    def adapter_digest(self) -> bytes | None:
        """What keys and values depend on beside tokens: the content of the adapter; None for the base model."""
        return None if self.adapter is None else self.adapter.digest

    @property
    def num_carried_tokens(self) -> int:
        """Output tokens that came with the request."""
        return len(self.request.output_token_ids[self.choice]) if self.request.output_token_ids else 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_expected_tokens(self) -> int:
        return self.num_tokens + self.pending

    def room_to_sample(self, max_model_len: int) -> int:
        """Tokens that may still be sampled after the pending one."""
        expected, limit = self.num_expected_tokens, self.request.sampling.max_tokens
        longest = max_model_len if limit is None else min(max_model_len, self.num_prompt_tokens + limit)
        return longest - expected

    def token_ids(self, start: int, end: int) -> list[int]:
        """Prompt, then output, of positions `start` to `end` (exclusive)."""
        prompt = self.num_prompt_tokens
        if start >= prompt:
            return self.output_token_ids[start - prompt : end - prompt]
        return self.request.prompt_token_ids[start:end] + self.output_token_ids[: max(0, end - prompt)]

    def plan_chunk(self, length: int, num_drafts: int = 0) -> Chunk:
        """The next `length` tokens, and after the last expected one `num_drafts` guesses. The blocks are there."""
        start, known = self.num_planned_tokens, self.num_tokens
        end = start + length
        tokens = self.token_ids(start, end)
        sample = end == known + self.pending
        if end > known:
            assert end == known + 1, "two tokens are pending"
            tokens.append(UNKNOWN)
        if num_drafts:
            tokens += self.draft_token_ids[:num_drafts]
        told, new = self._new_blocks()
        wants_logprobs = self.prompt_logprobs is not None and start < self.num_prompt_tokens - 1
        chunk = Chunk(self.sequence_id, start, tokens, told, new, sample, wants_logprobs, num_drafts)
        self.num_planned_tokens = end + num_drafts
        self.pending += sample
        self.drafting = num_drafts > 0
        self.draft_token_ids = []
        return chunk

    def _new_blocks(self) -> tuple[tuple[int, ...], tuple[list[int], ...]]:
        """For each KV group, where in the table the blocks go that no plan has told yet, and these; they are told now.

        All tables are of one length.
        """
        if min(self.blocks_sent) == len(self.held.tables[0]):
            return tuple(self.blocks_sent), tuple([[]] * len(self.blocks_sent))
        told = tuple(map(max, self.blocks_sent, self.held.trimmed))
        new = tuple(table[first:] for table, first in zip(self.held.tables, told, strict=True))
        self.blocks_sent = [len(table) for table in self.held.tables]
        return told, new

    def begin(self, num_tokens: int) -> None:
        """Its tables hold so many tokens that it need not compute."""
        self.num_computed_tokens = self.num_planned_tokens = num_tokens

    def introduction(self) -> NewSequence:
        self.known_to_runners = True
        return NewSequence(
            self.sequence_id, self.choice, self.seed,
            self.request.sampling if self.group is None else self.group.sampling,
            self.request.prompt_token_ids, list(self.output_token_ids),
            0 if self.adapter is None else self.adapter.number,
        )  # fmt: skip

    def computed(self, chunk: Chunk, num_sampled: int) -> None:
        """The runners have done `chunk`, in this epoch, and all its drafts were right but the last few.

        `num_sampled`: tokens that it gave, one more than drafts that were right.
        """
        assert chunk.start == self.num_computed_tokens, "a chunk was committed out of order"
        self.num_computed_tokens = chunk.end
        if chunk.num_drafts:
            self.num_computed_tokens -= chunk.num_drafts + 1 - num_sampled
            self.num_planned_tokens = self.num_computed_tokens
            self.drafting = False

    def back_to_computed(self) -> None:
        """The steps under way were not computed: plan them again, and tell the runners everything anew."""
        self.num_planned_tokens = self.num_computed_tokens
        self.pending = 0
        self.drafting = False
        self.draft_token_ids = []
        self.known_to_runners = False
        self.blocks_sent = list(self.held.trimmed)

    def set_aside(self, swapped: Swapped) -> None:
        """Its blocks were taken away, but what they hold is kept. A step under way counts."""
        self.swapped = swapped
        self.known_to_runners = False
        self.blocks_sent = [0] * len(self.held.tables)
        self.draft_token_ids = []

    def start_over(self) -> None:
        """After its blocks were taken away: all of it is computed again. A pending token will come all the same."""
        pending = self.pending
        self.epoch += 1
        self.swapped = None
        self.looked_on_disk = False
        self.num_computed_tokens = 0
        self.back_to_computed()
        self.pending = pending
        if self.prompt_logprobs is not None and not pending:  # those of the whole prompt come with a pending token
            self.prompt_logprobs = []


def adapter_names(sequences: Iterable[Sequence]) -> list[str]:
    """Of the adapters that they use."""
    return sorted({s.adapter.name for s in sequences if s.adapter is not None})
