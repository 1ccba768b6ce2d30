"""Gated feed-forward layer (arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor

from octavo.backends.reference import Ops
from octavo.layers.linear import Linear, RowLinear


class GatedMLP:
    def __init__(self, ops: Ops, gate_up: Linear, down: RowLinear, activation: str) -> None:
        self.ops, self.gate_up, self.down, self.activation = ops, gate_up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H]: down(act(gate(x)) * up(x))."""
        return self.down(self.ops.gated_act(self.gate_up(x), self.activation))
