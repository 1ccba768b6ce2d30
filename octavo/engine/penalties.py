"""How often which tokens stand in a sequence: what repetition, frequency and presence penalties need. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.engine.plan import NewSequence
from octavo.engine.types import SamplingParams


class TokenCounts:
    """The distinct tokens that penalties of one sequence touch, and how often each stands in its output.

    Arrays that grow by doubling: a step costs a copy of them, and a new token costs the same however long the output.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt)
        self._place = {token: index for index, token in enumerate(distinct)}
        self._tokens = np.fromiter(distinct, np.int64, len(distinct))
        self._counts = np.zeros(len(distinct), np.float32)
        self._in_prompt = len(distinct)
        self._output: list[int] = []
        for token in output:
            self.note(token)

    @property
    def num_noted(self) -> int:
        return len(self._output)

    def note(self, token: int) -> None:
        """One more `token` in the output."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            room = max(16, place)
            self._tokens = np.concatenate((self._tokens, np.zeros(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
        self._tokens[place] = token
        self._counts[place] += 1
        self._output.append(token)

    def undo(self) -> None:
        """Takes the last token back."""
        token = self._output.pop()
        place = self._place[token]
        self._counts[place] -= 1
        if place >= self._in_prompt and self._counts[place] == 0:
            del self._place[token]  # it was the newest, so its place is the last

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self._tokens[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._place)]


def counts_of(new: NewSequence) -> TokenCounts | None:
    """None when no penalty asks for them. Only the repetition penalty looks at the prompt."""
    p = new.sampling
    if not has_penalties(p):
        return None
    return TokenCounts(new.prompt_token_ids if p.repetition_penalty != 1 else (), new.output_token_ids)


def has_penalties(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
