"""What loaded adapters (LoRA, arXiv:2106.09685) add to a linear layer, each to the rows of its own sequences.

    rows of adapter a   out[rows] += up_a(down_a(x[rows]))

Both products are linears of the backend, whose rows do not depend on each other, and the sum is taken element by
element in float32: so what a row gets does not depend on which other rows, or adapters, are in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.backends.base import AdapterRows
from octavo.backends.reference import Ops, PackedLinear


@dataclass(frozen=True)
class LowRank:
    """One adapter's part in one linear [K] to [N] of this rank, which may stack several tensors of the checkpoint."""

    down: PackedLinear
    """the tensors' A below each other: [sum of ranks, K]"""
    up: PackedLinear
    """their B, scaled, each in its own rows and columns and zeros elsewhere: [N, sum of ranks]"""


class StepAdapters:
    """Which rows of the step at hand belong to which adapter: set once a step by the decoder, read by all linears."""

    rows: tuple[AdapterRows, ...] = ()


class LinearAdapters:
    """The adapters of one linear, by number. One that does not change this linear is absent."""

    def __init__(self, ops: Ops, step: StepAdapters) -> None:
        self.ops, self.step = ops, step
        self.loaded: dict[int, LowRank] = {}

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """`out` [T, N], in which each adapter's rows got what it adds for `x` [T, K]."""
        for part in self.step.rows:
            low_rank = self.loaded.get(part.adapter)
            if low_rank is None:
                continue
            if part.rows is None:
                out.add_(self._delta(x, low_rank))
            else:
                mine = out.index_select(0, part.rows).add_(self._delta(x.index_select(0, part.rows), low_rank))
                out.index_copy_(0, part.rows, mine)
        return out

    def _delta(self, x: Tensor, low_rank: LowRank) -> Tensor:
        """float32 [T, N]"""
        return self.ops.linear(self.ops.linear(x, low_rank.down), low_rank.up, out_dtype=torch.float32)
