"""When and how far to guess ahead: what every way of speculative decoding shares. No torch.

A guess costs a row of computing and saves a step where it is right. So each sequence's drafts grow while all are right,
shrink to what was right, and rest for ever longer while none is. This looks at the sequence's own tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from octavo.config import Speculation
from octavo.engine.plan import Chunk, NewSequence

FIRST_REST, LONGEST_REST = 4, 256
"""tokens generated without a guess after one alone was wrong"""
Given = list[int] | None
"""the tokens that followed a chunk: drafts that were right, and one; None where nothing was sampled"""


class Proposer(Protocol):
    """Rows are those of `batch.Rows`. A guess may be anything: answers do not depend on it."""

    def add(self, row: int, new: NewSequence) -> None:
        """Begins anew with a sequence."""

    def remove(self, row: int) -> None: ...

    def propose(self, chunks: Sequence[Chunk], rows: Sequence[int], given: Sequence[Given]) -> dict[int, list[int]]:
        """After a step: guesses of what follows `given`, by sequence id."""


class Pace:
    """How many tokens to guess for one sequence."""

    def __init__(self, most: int, limit: int) -> None:
        self.limit = limit
        """tokens that the sequence can have in all"""
        self._most = self._length = most
        self._rest, self._next_rest = 0, FIRST_REST

    def judge(self, guessed: int, right: int) -> None:
        """Of the last `guessed` tokens, the first `right` were."""
        if guessed == 0:
            self._rest = max(0, self._rest - 1)
        elif right == guessed:
            self._length, self._next_rest = min(self._most, 2 * max(self._length, guessed)), FIRST_REST
        elif right:
            self._length, self._next_rest = min(self._most, right + 1), FIRST_REST
        elif guessed > 1:
            self._length = max(1, min(self._length, guessed) // 2)
        else:
            self._rest, self._next_rest = self._next_rest, min(LONGEST_REST, 2 * self._next_rest)

    def count(self, num_tokens: int) -> int:
        """Guesses to make after so many tokens. The last token of all needs none: a step gives one anyway."""
        return 0 if self._rest else max(0, min(self._length, self.limit - num_tokens - 1))


class DraftLengths:
    """The pace of every row, and the limit on the batch."""

    def __init__(self, speculation: Speculation, max_model_len: int, eos_token_ids: Iterable[int] = ()) -> None:
        self._most, self._max_model_len = speculation.num_speculative_tokens, max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._most_sequences = speculation.disable_by_batch_size
        self._paces: dict[int, Pace] = {}
        self._ends: dict[int, frozenset[int]] = {}

    def add(self, row: int, new: NewSequence) -> None:
        most_tokens = new.sampling.max_tokens
        limit = self._max_model_len
        if most_tokens is not None:
            limit = min(limit, len(new.prompt_token_ids) + most_tokens)
        if new.sampling.use_beam_search:  # what is sampled is not what follows
            limit = 0
        self._paces[row] = Pace(self._most, limit)
        eos = frozenset[int]() if new.sampling.ignore_eos else self._eos_token_ids
        self._ends[row] = eos.union(new.sampling.stop_token_ids)

    def remove(self, row: int) -> None:
        self._paces.pop(row, None)
        self._ends.pop(row, None)

    def ends(self, row: int, token: int) -> bool:
        """Whether the answer is likely to end with that token, so that there is nothing to guess after it."""
        return token in self._ends[row]

    def of(self, chunks: Sequence[Chunk], rows: Sequence[int], given: Sequence[Given]) -> list[int]:
        """For each chunk, how many tokens to guess after what it gave."""
        few = sum(tokens is not None for tokens in given) <= self._most_sequences
        counts = []
        for chunk, row, tokens in zip(chunks, rows, given, strict=True):
            if not tokens:
                counts.append(0)
                continue
            pace = self._paces[row]
            pace.judge(chunk.num_drafts, len(tokens) - 1)
            counts.append(pace.count(known_tokens(chunk) + len(tokens)) if few else 0)
        return counts


def known_tokens(chunk: Chunk) -> int:
    """Tokens of the sequence up to the chunk's last one that is no guess."""
    return chunk.end - chunk.num_drafts
