"""What choosing tokens needs between steps, and the choice itself: `SamplingParams` to `SamplingTensors` to tokens.

All of it lives here, on rank 0, and is fed by the tokens that were sampled here: a plan may be made before they are
known. It depends on nothing but a sequence's own tokens, so it is the same after preemption, from `NewSequence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.backends.base import Device, Penalties, SamplingTensors
from octavo.engine.batch import Indices
from octavo.engine.constraints import Constraints, constraints_of
from octavo.engine.grammar import Compiler, Masks, Place
from octavo.engine.logit_changes import LogitChanges
from octavo.engine.logprobs import token_logprobs
from octavo.engine.noise import noise_keys, noise_stem
from octavo.engine.penalties import PenaltyTable, TokenCounts
from octavo.engine.plan import Chunk, NewSequence, Sampled
from octavo.engine.types import TokenLogprobs

NO_LOGPROBS = -1
Follower = TokenCounts | Constraints | Place


class Sampler:
    """Rows as `batch.Rows` gives them. A row that asks for nothing rare costs nothing for it."""

    def __init__(
        self, height: int, vocab_size: int, device: Device, eos_token_ids: Sequence[int] = (),
        compiler: Compiler | None = None,
    ) -> None:  # fmt: skip
        """`compiler` is for sequences with structured output; only rank 0, which samples, has one."""
        self._vocab_size, self._device, self._eos_token_ids = vocab_size, device, eos_token_ids
        self._shape = np.zeros((3, height), np.float32)
        """temperature, top_p and min_p"""
        self._top_k = np.zeros(height, np.int32)
        self._logprobs = np.zeros(height, np.int64)
        self._stems = np.zeros(height, np.uint64)
        self._filtered = np.zeros(height, bool)
        self._prompt_length = np.zeros(height, np.int64)
        self._num_noted = np.zeros(height, np.int64)
        """output tokens that the two below know of"""
        self._penalized, self._constrained = np.zeros(height, bool), np.zeros(height, bool)
        self._penalties = PenaltyTable(height, self._upload)
        self._constraints: dict[int, Constraints] = {}
        self._listed: dict[int, tuple[int, ...]] = {}
        self._masks = None if compiler is None else Masks(compiler)

    def add(self, row: int, new: NewSequence) -> None:
        p = new.sampling
        self._shape[:, row] = p.temperature, p.top_p, p.min_p
        self._top_k[row] = min(p.top_k, self._vocab_size)
        self._filtered[row] = not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        self._stems[row] = noise_stem(new.seed, new.choice)
        self._prompt_length[row], self._num_noted[row] = len(new.prompt_token_ids), len(new.output_token_ids)
        self.remove(row)
        top = p.num_logprobs(self._vocab_size)
        self._logprobs[row] = NO_LOGPROBS if top is None else top
        if p.logprob_token_ids is not None:
            self._listed[row] = p.logprob_token_ids
        self._penalized[row] = self._penalties.add(row, new)
        if (constraints := constraints_of(new, self._eos_token_ids, self._vocab_size)) is not None:
            self._constraints[row] = constraints
        self._constrained[row] = constraints is not None
        if self._masks is not None:
            self._masks.add(row, new)

    def remove(self, row: int) -> None:
        self._penalties.remove(row)
        for kept in (self._listed, self._constraints):
            kept.pop(row, None)
        if self._masks is not None:
            self._masks.remove(row)

    def fault(self, row: int) -> str | None:
        """Why its grammar leaves the row no token, if that is known."""
        place = None if self._masks is None else self._masks.places.get(row)
        return None if place is None else place.fault

    def begin(self, chunks: Sequence[Chunk], rows: Indices) -> None:
        """Before the model runs: what of `sample`, for those of the chunks that sample, can be computed beside it."""
        if not self._masks:
            return
        asking = [(chunk, row) for chunk, row in zip(chunks, rows.tolist(), strict=True) if chunk.sample]
        for chunk, row in asking:
            if (place := self._masks.places.get(row)) is not None:
                split = len(chunk.token_ids) - chunk.num_drafts
                _catch_up(place, chunk.start + split - int(self._prompt_length[row]), chunk.token_ids[:split])
        self._masks.begin(asking)

    def sample(self, logits: Tensor, chunks: Sequence[Chunk], rows: Indices) -> list[list[Sampled]]:
        """The tokens that follow each of `chunks`: drafts as far as they are what is sampled here, and one more.

        `logits` [R, V] has num_drafts + 1 rows for each chunk in turn, and may be overwritten. The list ends early,
        and may be empty, where a sequence's parameters leave no token to choose.
        """
        row_of, firsts = rows, np.arange(len(rows))
        known = positions = np.fromiter((c.end for c in chunks), np.int64, len(chunks))
        if logits.shape[0] > len(chunks):
            places = np.fromiter((c.num_drafts + 1 for c in chunks), np.int64, len(chunks))
            firsts, known = np.cumsum(places) - places, positions - places + 1
            row_of = np.repeat(rows, places)
            positions = np.arange(len(row_of)) + np.repeat(known - firsts, places)
        reported = (self._logprobs[row_of] != NO_LOGPROBS).nonzero()[0]
        raw = logits[self._upload(reported)] if len(reported) else None
        changes = LogitChanges(self._vocab_size, self._upload)
        penalized = self._follow(chunks, rows, firsts, known, changes)
        for place, bits in (self._masks.finish() if self._masks else {}).items():
            changes.narrow(place, bits)
        penalties = self._penalties.tensors(firsts[penalized], rows[penalized])
        tokens, dead_ends = self._choose(logits, row_of, positions, changes, penalties)
        found = {} if raw is None else self._report(raw, tokens, reported, row_of)
        chosen = self._device.download(tokens).tolist()
        sampled = [None if i in dead_ends else Sampled(token, found.get(i)) for i, token in enumerate(chosen)]
        if len(sampled) == len(chunks):
            following = [[] if one is None else [one] for one in sampled]
        else:
            following = [
                _accepted(chunk, sampled[first : first + chunk.num_drafts + 1])
                for chunk, first in zip(chunks, firsts.tolist(), strict=True)
            ]
        self._note(rows, following)
        return following

    def guess(self, logits: Tensor, rows: Indices, positions: Indices) -> list[int | None]:
        """What would be sampled at `positions` if `logits` [R, V], one row for each of `rows`, were the model's.

        None where no token is left. The guesses count as output until `take_back`.
        """
        changes = LogitChanges(self._vocab_size, self._upload)
        for place, row in enumerate(rows.tolist()):
            if row in self._penalties.of:
                self._penalties.draft(place, row)
            if row in self._constraints:
                changes.constrain(place, self._constraints[row])
        for place, bits in (self._masks.at_once(rows.tolist()) if self._masks else {}).items():
            changes.narrow(place, bits)
        none = np.zeros(0, np.int64)
        tokens, dead_ends = self._choose(logits, rows, positions, changes, self._penalties.tensors(none, none))
        guesses = [None if i in dead_ends else t for i, t in enumerate(self._device.download(tokens).tolist())]
        for row, guess in zip(rows.tolist(), guesses, strict=True):
            if guess is not None:
                for follower in self._followers(row):
                    follower.note(guess)
        return guesses

    def take_back(self, row: int, count: int) -> None:
        """The last `count` tokens of the row were only guesses."""
        for follower in self._followers(row):
            for _ in range(count):
                follower.undo()

    def _followers(self, row: int) -> list[Follower]:
        """What keeps an account of the row's output."""
        grammars = {} if self._masks is None else self._masks.places
        kept: tuple[Mapping[int, Follower], ...] = (self._penalties.of, self._constraints, grammars)
        return [followers[row] for followers in kept if row in followers]

    def _choose(
        self, logits: Tensor, rows: Indices, positions: Indices, changes: LogitChanges, penalties: Penalties | None
    ) -> tuple[Tensor, set[int]]:
        """A token for each row of the logits, which are those of sampler `rows`; and where none was left."""
        tokens = self._device.ops.sample(logits, self._tensors(rows, positions, changes, penalties))
        dead_ends = changes.dead_ends(logits, tokens, self._device.download)
        if changes.forced:
            forced = np.array(list(changes.forced.items()))
            tokens[self._upload(forced[:, 0])] = self._upload(forced[:, 1])
        return tokens, dead_ends

    def _follow(
        self, chunks: Sequence[Chunk], rows: Indices, firsts: Indices, known: Indices, changes: LogitChanges
    ) -> Indices:
        """Gathers what the output before each place to sample changes there; `known` [chunks] are tokens before drafts.

        Gives the chunks whose penalties are as the table has them: all that have any, but those with drafts.
        """
        num_output = known - self._prompt_length[rows]
        drafted = np.fromiter((c.num_drafts > 0 for c in chunks), bool, len(chunks))
        penalized, constrained = self._penalized[rows], self._constrained[rows]
        stale = self._num_noted[rows] != num_output
        for i in (constrained | penalized & (drafted | stale)).nonzero()[0].tolist():
            self._follow_one(chunks[i], int(rows[i]), int(firsts[i]), int(num_output[i]), changes)
        self._num_noted[rows] = num_output
        chosen: Indices = (penalized & ~drafted).nonzero()[0]
        return chosen

    def _follow_one(self, chunk: Chunk, row: int, first: int, num_output: int, changes: LogitChanges) -> None:
        split = len(chunk.token_ids) - chunk.num_drafts
        latest, drafts = chunk.token_ids[:split], chunk.token_ids[split:]
        counts, constraints = self._penalties.of.get(row), self._constraints.get(row)
        if counts is not None:
            if counts.num_noted != num_output:
                _catch_up(counts, num_output, latest)
                self._penalties.reload(row)
            for place in _with_drafts(counts, drafts) if drafts else ():
                self._penalties.draft(first + place, row)
        if constraints is not None:
            _catch_up(constraints, num_output, latest)
            for place in _with_drafts(constraints, drafts):
                changes.constrain(first + place, constraints)

    def _note(self, rows: Indices, following: Sequence[Sequence[Sampled]]) -> None:
        self._num_noted[rows] += np.fromiter(map(len, following), np.int64, len(following))
        row_of = rows.tolist()
        for i in self._penalized[rows].nonzero()[0].tolist():
            for one in following[i]:
                self._penalties.note(row_of[i], one.token_id)
        for i in self._constrained[rows].nonzero()[0].tolist():
            for one in following[i]:
                self._constraints[row_of[i]].note(one.token_id)
        if self._masks:
            for row, sampled in zip(row_of, following, strict=True):
                self._masks.note(row, [one.token_id for one in sampled])

    def _tensors(
        self, rows: Indices, positions: Indices, changes: LogitChanges, penalties: Penalties | None
    ) -> SamplingTensors:
        keys, shape = noise_keys(self._stems[rows], positions).view(np.int64), self._shape.take(rows, axis=1)
        temperature, top_p, min_p = self._upload(shape).unbind()
        return SamplingTensors(
            temperature, self._upload(self._top_k[rows]), top_p, min_p, self._upload(keys),
            all_greedy=not shape[0].any(), needs_filter=bool(self._filtered[rows].any()), mask=changes.mask(),
            edits=changes.edits(), penalties=penalties,
        )  # fmt: skip

    def _report(self, raw: Tensor, tokens: Tensor, reported: Indices, rows: Indices) -> dict[int, TokenLogprobs]:
        """By row of the logits; `raw` holds those rows that are `reported`."""
        mine = rows[reported]
        listed = {i: ids for i, row in enumerate(mine.tolist()) if (ids := self._listed.get(row))}
        tops = self._logprobs[mine].tolist()
        found = token_logprobs(self._device, raw, tokens[self._upload(reported)], tops, listed)
        return dict(zip(reported.tolist(), found, strict=True))

    def _upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return self._device.upload(torch.from_numpy(array))


def _catch_up(follower: Follower, wanted: int, latest: Sequence[int]) -> None:
    """Makes it know `wanted` output tokens, the last of them `latest`.

    It does already, unless a step was planned again after its tokens were lost.
    """
    while follower.num_noted > wanted:
        follower.undo()
    if follower.num_noted < wanted:
        for token in latest[follower.num_noted - wanted :]:
            follower.note(token)
    assert follower.num_noted == wanted, "tokens of a sequence are missing"


def _with_drafts(follower: Follower, drafts: Sequence[int]) -> Iterator[int]:
    """Lets it know none of `drafts`, the first, the first two, … all, and at last none again."""
    for count, draft in enumerate(drafts):
        yield count
        follower.note(draft)
    yield len(drafts)
    for _ in drafts:
        follower.undo()


def _accepted(chunk: Chunk, sampled: Sequence[Sampled | None]) -> list[Sampled]:
    """Up to the first that is not the draft in its place, or that there is none of."""
    drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
    following: list[Sampled] = []
    for place, one in enumerate(sampled):
        if one is None:
            break
        following.append(one)
        if place < len(drafts) and drafts[place] != one.token_id:
            break
    return following
