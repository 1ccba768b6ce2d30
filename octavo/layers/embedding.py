"""Token embedding and output matrix, whose rows the ranks share."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.backends.reference import Ops, PackedLinear
from octavo.dist.group import Group


class Embedding:
    """Rank r holds rows r * n to (r + 1) * n of the vocabulary, n the same for all (the last are padding)."""

    def __init__(self, ops: Ops, table: Tensor, group: Group) -> None:
        self.ops, self.table, self.group = ops, table, group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] to [T, H]."""
        if self.group.size == 1:
            return self.ops.embed(self.table, token_ids)
        rows = self.table.shape[0]
        local = token_ids - self.group.rank * rows
        ours = (local >= 0) & (local < rows)
        hidden = self.ops.embed(self.table, local.clamp(0, rows - 1))
        return self.group.all_reduce(hidden.masked_fill_(~ours.unsqueeze(1), 0))


class OutputMatrix:
    """Hidden states to logits; split as the embedding."""

    def __init__(self, ops: Ops, packed: PackedLinear, group: Group, vocab_size: int) -> None:
        self.ops, self.packed, self.group, self.vocab_size = ops, packed, group, vocab_size

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, H] to float32 [R, V]."""
        logits = self.ops.linear(hidden, self.packed, out_dtype=torch.float32)
        if self.group.size == 1:
            return logits
        return self.group.all_gather(logits)[:, : self.vocab_size].contiguous()
