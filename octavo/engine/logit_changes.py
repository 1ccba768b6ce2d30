"""What the sampling parameters of a step's sequences change in its logits, gathered row by row, then made tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.backends.base import Edits, Mask
from octavo.engine.constraints import Constraints

Upload = Callable[[npt.NDArray[np.generic]], Tensor]


class LogitChanges:
    """`place` is a row of the logits."""

    def __init__(self, vocab_size: int, upload: Upload) -> None:
        self._vocab_size, self._upload = vocab_size, upload
        self.forced: dict[int, int] = {}
        """place to the token that it must have"""
        self._masks: dict[int, npt.NDArray[np.int32]] = {}
        self._banned: list[npt.NDArray[np.int64]] = []
        self._biased: list[npt.NDArray[np.int64]] = []
        self._bias: list[npt.NDArray[np.float32]] = []
        self._narrowed: list[int] = []
        self._hopeless: set[int] = set()

    def constrain(self, place: int, constraints: Constraints) -> None:
        """By what holds after the tokens noted so far."""
        if (token := constraints.forced()) is not None:
            self.forced[place] = token
            return
        base = place * self._vocab_size
        mask, banned = constraints.mask(), constraints.banned()
        if mask is not None:
            self._masks[place] = mask
        self._banned += [base + tokens for tokens in banned]
        if mask is not None or banned:
            self._narrowed.append(place)
        if constraints.bias is not None:
            tokens, values = constraints.bias
            self._biased.append(base + tokens)
            self._bias.append(values)

    def narrow(self, place: int, bits: npt.NDArray[np.int32]) -> None:
        """To the tokens in `bits`, int32 [ceil(V / 32)], of those that are allowed otherwise."""
        other = self._masks.get(place)
        self._masks[place] = bits if other is None else bits & other
        if bits.any():
            self._narrowed.append(place)
        else:
            self._hopeless.add(place)

    def mask(self) -> Mask | None:
        if not self._masks:
            return None
        rows = np.fromiter(self._masks, np.int64, len(self._masks))
        return Mask(self._upload(rows), self._upload(np.stack(list(self._masks.values()))))

    def edits(self) -> Edits | None:
        if not self._banned and not self._biased:
            return None
        none = [np.zeros(0, np.int64)]
        bias = np.concatenate(self._bias or [np.zeros(0, np.float32)])
        banned, biased = np.concatenate(self._banned or none), np.concatenate(self._biased or none)
        return Edits(self._upload(banned), self._upload(biased), self._upload(bias))

    def dead_ends(self, logits: Tensor, tokens: Tensor, download: Callable[[Tensor], Tensor]) -> set[int]:
        """Places where nothing was left to choose: those whose token in `tokens` [R] is -inf in the changed logits."""
        if not self._narrowed:
            return self._hopeless
        places = self._upload(np.array(self._narrowed, np.int64))
        values = download(logits[places, tokens[places]]).numpy()
        return self._hopeless.union(p for p, value in zip(self._narrowed, values, strict=True) if value == -np.inf)
