"""Linear layers and how ranks split them (arXiv:1909.08053): first by output features, then by input features."""

from __future__ import annotations

from torch import Tensor

from octavo.backends.reference import Ops, PackedLinear
from octavo.dist.group import Group
from octavo.layers.lora import LinearAdapters


class Linear:
    """x [T, K] to [T, N]. Split by output features ("column parallel") it is this rank's N, and needs no exchange."""

    adapters: LinearAdapters | None = None
    """set where adapters may be loaded"""

    def __init__(self, ops: Ops, packed: PackedLinear) -> None:
        self.ops, self.packed = ops, packed

    def __call__(self, x: Tensor) -> Tensor:
        out = self.ops.linear(x, self.packed)
        return out if self.adapters is None else self.adapters.add_to(out, x)


class RowLinear(Linear):
    """Split by input features: x is this rank's K, and the results are summed. Rank 0 alone holds the bias."""

    def __init__(self, ops: Ops, packed: PackedLinear, group: Group) -> None:
        super().__init__(ops, packed)
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(super().__call__(x))
