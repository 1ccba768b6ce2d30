"""Prompt lookup (vLLM's "ngram"): what followed the last few tokens where they stood before is likely to follow again.

No torch. An index of the row's own tokens grows with them, so a step costs the same however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from octavo.config import Speculation
from octavo.engine.drafting import DraftLengths, Given
from octavo.engine.plan import Chunk, NewSequence

MOST_PLACES = 32
"""earlier places that are compared in a step, the latest first"""


class TokenIndex:
    """One sequence's tokens, and where the last `least` of them stood before.

    As in LZ77 compressors: a table from each run of `least` tokens to where it last ended, and for each such end the
    one before it. Adding a token takes constant time, `guess` at most MOST_PLACES comparisons.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.tokens = array("i")
        self._latest: dict[bytes, int] = {}
        self._before = array("i")
        """for the run that ends before each position, where the same run ended before; -1 for nowhere"""

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            run = self.tokens[-self._least :].tobytes() if end >= self._least else b""
            self._before.append(self._latest.get(run, -1))
            if run:
                self._latest[run] = end

    def guess(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the place with the longest match, the latest of equally long ones."""
        best, best_length = -1, self._least - 1
        end = self._before[-1] if self.tokens else -1
        for _ in range(MOST_PLACES):
            if end < 0 or best_length == self._most:
                break
            length = self._match(end)
            if length > best_length:
                best, best_length = end, length
            end = self._before[end - 1]
        if best < 0:
            return []
        guessed: list[int] = []
        for place in range(best, best + count):  # beyond the end, what repeats goes on repeating
            guessed.append(self.tokens[place] if place < len(self.tokens) else guessed[place - len(self.tokens)])
        return guessed

    def _match(self, end: int) -> int:
        """How many tokens before `end` are those at the end of all, from `least` (known) to `most`."""
        tokens, length = self.tokens, self._least
        whole = len(tokens)
        while length < self._most and length < end and tokens[end - length - 1] == tokens[whole - length - 1]:
            length += 1
        return length


class NgramProposer:
    """Implements `drafting.Proposer`."""

    def __init__(self, speculation: Speculation, max_model_len: int, eos_token_ids: Iterable[int] = ()) -> None:
        self._least, self._most = speculation.prompt_lookup_min, speculation.prompt_lookup_max
        self._lengths = DraftLengths(speculation, max_model_len, eos_token_ids)
        self._index: dict[int, TokenIndex] = {}

    def add(self, row: int, new: NewSequence) -> None:
        self._lengths.add(row, new)
        index = self._index[row] = TokenIndex(self._least, self._most)
        index.extend(new.prompt_token_ids)
        index.extend(new.output_token_ids)

    def remove(self, row: int) -> None:
        self._lengths.remove(row)
        self._index.pop(row, None)

    def propose(self, chunks: Sequence[Chunk], rows: Sequence[int], given: Sequence[Given]) -> dict[int, list[int]]:
        counts = self._lengths.of(chunks, rows, given)
        drafts: dict[int, list[int]] = {}
        for chunk, row, tokens, count in zip(chunks, rows, given, counts, strict=True):
            self._index[row].extend(tokens or ())
            if count and (guessed := self._index[row].guess(count)):
                end = next((i for i, token in enumerate(guessed) if self._lengths.ends(row, token)), count)
                drafts[chunk.sequence_id] = guessed[: end + 1]
        return drafts
