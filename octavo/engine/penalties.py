"""Which tokens stand how often in which sequence: what repetition, frequency and presence penalties need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.backends.base import Penalties
from octavo.engine.plan import NewSequence
from octavo.engine.types import SamplingParams

Indices = npt.NDArray[np.int64]
Upload = Callable[[npt.NDArray[np.generic]], Tensor]
FIRST_WIDTH = 64


class TokenCounts:
    """The distinct tokens that penalties of one sequence touch, each with a place, in the order in which they were met,
    and how often each stands in the output. A new token costs the same however long the output is."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._counts = [0] * len(self._place)
        self._in_prompt = len(self._place)
        self._output: list[int] = []
        for token in output:
            self.note(token)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def num_noted(self) -> int:
        return len(self._output)

    def note(self, token: int) -> tuple[int, int]:
        """One more `token` in the output: its place and how often it stands there now."""
        place = self._place.setdefault(token, len(self._counts))
        if place == len(self._counts):
            self._counts.append(0)
        self._counts[place] += 1
        self._output.append(token)
        return place, self._counts[place]

    def undo(self) -> None:
        """Takes the last token back."""
        token = self._output.pop()
        place = self._place[token]
        self._counts[place] -= 1
        if place >= self._in_prompt and self._counts[place] == 0:
            del self._place[token]  # it was the newest, so its place is the last
            self._counts.pop()

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        return np.fromiter(self._place, np.int32, len(self._place))

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return np.array(self._counts, np.float32)


class PenaltyTable:
    """Keeps the counts of all sampler rows on the device, so that a step brings only what is new:

        tokens, counts   [ row 0 …… unused | row 1 … unused | …       ]    each row `width` long
                           ◀ lengths[0] ▶    ◀ lengths[1] ▶

    What a row's sequence has sampled is noted at once on the host, and reaches the device with the next `tensors`.
    """

    def __init__(self, height: int, upload: Upload) -> None:
        self._height, self._width, self._upload = height, FIRST_WIDTH, upload
        self.of: dict[int, TokenCounts] = {}
        """by row; only sequences that ask for penalties are in it"""
        self._lengths = np.zeros(height, np.int64)
        self._strengths = np.zeros((3, height), np.float32)
        self._tokens, self._counts = self._empty(np.int32), self._empty(np.float32)
        self._new_tokens: dict[int, int] = {}
        self._new_counts: dict[int, int] = {}
        self._drafted: list[tuple[int, int, npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []

    def add(self, row: int, new: NewSequence) -> bool:
        """False when no penalty asks for it. Only the repetition penalty looks at the prompt."""
        p = new.sampling
        if not has_penalties(p):
            return False
        self.of[row] = TokenCounts(new.prompt_token_ids if p.repetition_penalty != 1 else (), new.output_token_ids)
        self._strengths[:, row] = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        self.reload(row)
        return True

    def remove(self, row: int) -> None:
        self.of.pop(row, None)

    def reload(self, row: int) -> None:
        """Brings a whole row to the device."""
        self._bring_news()
        counts = self.of[row]
        while len(counts) > self._width:
            self._widen()
        start, end = row * self._width, row * self._width + len(counts)
        self._tokens[start:end] = self._upload(counts.tokens)
        self._counts[start:end] = self._upload(counts.counts)
        self._lengths[row] = len(counts)

    def note(self, row: int, token: int) -> None:
        """One more `token` in the output of a row that is in `of`."""
        place, count = self.of[row].note(token)
        if place == self._width:
            self._bring_news()
            self._widen()
        if place == self._lengths[row]:
            self._lengths[row] = place + 1
        at = row * self._width + place
        self._new_tokens[at], self._new_counts[at] = token, count

    def draft(self, place: int, row: int) -> None:
        """The next `tensors` penalizes `place`, a row of the logits, by what `of[row]` holds now."""
        counts = self.of[row]
        self._drafted.append((place, row, counts.tokens, counts.counts))

    def tensors(self, places: Indices, rows: Indices) -> Penalties | None:
        """Penalties of sampler `rows` [N], each for one of `places` [N] in the logits, and of what was drafted."""
        self._bring_news()
        drafted, self._drafted = self._drafted, []
        starts, lengths, tokens, counts = rows * self._width, self._lengths[rows], self._tokens, self._counts
        if drafted:
            sizes = np.array([len(d[2]) for d in drafted])
            places = np.concatenate((places, [d[0] for d in drafted]))
            rows = np.concatenate((rows, [d[1] for d in drafted]))
            starts = np.concatenate((starts, self._height * self._width + np.cumsum(sizes) - sizes))
            lengths = np.concatenate((lengths, sizes))
            tokens = torch.cat((tokens, self._upload(np.concatenate([d[2] for d in drafted]))))
            counts = torch.cat((counts, self._upload(np.concatenate([d[3] for d in drafted]))))
        if not len(places):
            return None
        strengths, spans = self._strengths.take(rows, axis=1), np.concatenate((places, starts, lengths)).reshape(3, -1)
        of_logits, first_places, num_places = self._upload(spans).unbind()
        repetition, frequency, presence = self._upload(strengths).unbind()
        return Penalties(of_logits, first_places, num_places, repetition, frequency, presence, tokens, counts)

    def _bring_news(self) -> None:
        count = len(self._new_tokens)
        if count == 1:  # as in the decoding of a lone sequence, where arrays of one would take longer
            (place, token), (_, times) = self._new_tokens.popitem(), self._new_counts.popitem()
            self._tokens[place], self._counts[place] = token, times
        elif count:
            at = self._upload(np.fromiter(self._new_tokens, np.int64, count))
            self._tokens.index_copy_(0, at, self._upload(np.fromiter(self._new_tokens.values(), np.int32, count)))
            self._counts.index_copy_(0, at, self._upload(np.fromiter(self._new_counts.values(), np.float32, count)))
            self._new_tokens.clear()
            self._new_counts.clear()

    def _widen(self) -> None:
        """Doubles the width. Memory that is not used costs nothing where the system gives it lazily."""
        narrow, self._width = self._width, 2 * self._width
        old_tokens, old_counts = self._tokens, self._counts
        self._tokens, self._counts = self._empty(np.int32), self._empty(np.float32)
        self._tokens.view(self._height, -1)[:, :narrow] = old_tokens.view(self._height, -1)
        self._counts.view(self._height, -1)[:, :narrow] = old_counts.view(self._height, -1)

    def _empty(self, dtype: npt.DTypeLike) -> Tensor:
        return self._upload(np.zeros(self._height * self._width, dtype))


def has_penalties(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
