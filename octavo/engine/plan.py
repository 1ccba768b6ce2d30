"""What the scheduler tells the runners to do in one step, and what comes back. Plain values; no torch.

The same plan goes to every rank. It is complete (token ids and new blocks stand in it) and taking in a part of it twice
changes nothing, so a step that failed for one sequence can be planned again for the others.
"""

from __future__ import annotations

import msgspec

from octavo.engine.types import SamplingParams, TokenLogprobs

UNKNOWN = -1
"""as a token id: what the step before samples for this sequence. `fill_in` replaces it before the runners see it."""
COPY, SAVE, LOAD = range(3)


class Move(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies a block of one KV group: COPY within the device, SAVE from the device to a host slot, LOAD back."""

    kind: int
    group: int
    source: int
    target: int


class NewSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that the runners do not know, or no longer: at admission and after preemption."""

    sequence_id: int
    choice: int
    seed: int
    sampling: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    adapter: int = 0
    """number of the loaded adapter that computes it; 0 none"""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute `token_ids` of one sequence, which lie at positions `start`, `start + 1`, …"""

    sequence_id: int
    start: int
    token_ids: list[int]
    first_new_block: tuple[int, ...]
    """for each KV group, where in the block table `new_blocks` go"""
    new_blocks: tuple[list[int], ...]
    sample: bool
    """the chunk ends with the last known token, so the next one is to be sampled"""
    prompt_logprobs: bool = False
    """report the logprobs of the prompt tokens that follow this chunk's tokens"""
    num_drafts: int = 0
    """the last so many of `token_ids` are guesses: a token is sampled after each of them and after the one before"""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class AdapterChange(msgspec.Struct, frozen=True, array_like=True, tag="adapter"):
    """Between two steps: load the adapter in the folder `path` under this number, or with None unload that number."""

    number: int
    path: str | None


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="step", gc=False):
    """Do `moves` (once, come what may), forget `removed`, learn `added`, compute `chunks`; in that order."""

    removed: list[int]
    added: list[NewSequence]
    chunks: list[Chunk]
    moves: list[Move] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprobs: TokenLogprobs | None = None


class StepResult(msgspec.Struct, frozen=True, gc=False):
    sampled: list[list[Sampled] | None]
    """one for each chunk with `sample`, in the plan's order: the tokens that follow, one and as many as drafts were
    right; None where the model's output was NaN or infinite. Empty where the sequence's parameters allow no token."""
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    """by sequence id: of the prompt tokens after each of the chunk's tokens"""
    drafts: dict[int, list[int]] = {}
    """by sequence id: guesses of the tokens to come, for the next plan"""
    faults: dict[int, str] = {}
    """by sequence id: why there is no token, where its grammar is to blame"""
    seconds: float = 0.0
    """that the step took; 0 where nobody measured"""
    move_seconds: float = 0.0
    """of these, for its moves"""


def fill_in(plan: StepPlan, before: StepPlan, result: StepResult) -> None:
    """Puts the tokens that `before` sampled where `plan`, made while it ran, has UNKNOWN.

    A sequence whose step gave no token is going to end, so that any token does.
    """
    tokens: dict[int, int] = {}
    for chunk, sampled in zip((c for c in before.chunks if c.sample), result.sampled, strict=True):
        tokens[chunk.sequence_id] = sampled[-1].token_id if sampled else 0
    for chunk in plan.chunks:
        if chunk.token_ids[-1] == UNKNOWN:
            chunk.token_ids[-1] = tokens[chunk.sequence_id]


class SequenceFault(Exception):
    """A step failed because of one sequence; nothing was computed. The cause is chained."""

    def __init__(self, sequence_id: int) -> None:
        super().__init__(f"sequence {sequence_id} cannot be computed")
        self.sequence_id = sequence_id
