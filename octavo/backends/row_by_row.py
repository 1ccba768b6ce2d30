"""The reference operations, with products whose rows do not know each other: `OCTAVO_BATCH_INVARIANT=1`.

A product of several rows may add in another order than that of one row, as the libraries under torch choose by shape.
Here each row is multiplied by itself, from memory of its own, and attends to just the keys up to its own position; so
its bits depend on nothing else. Many times slower than the products of whole batches.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from octavo.backends.base import AttentionMeta, KVCache
from octavo.backends.reference import Ops, PackedLinear


def reference_ops() -> Ops:
    """Those that the environment asks for."""
    return RowByRowOps() if os.environ.get("OCTAVO_BATCH_INVARIANT") == "1" else Ops()


class RowByRowOps(Ops):
    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        if x.shape[0] == 0:
            return super().linear(x, packed, out_dtype)
        return torch.cat([Ops.linear(self, x[i : i + 1].clone(), packed, out_dtype) for i in range(x.shape[0])])

    def attention(self, q: Tensor, cache: KVCache, meta: AttentionMeta, scale: float, window: int | None) -> Tensor:
        starts, lens = meta.query_start.tolist(), meta.seq_lens.tolist()
        out = q.new_empty(q.shape)
        for s, seq_len in enumerate(lens):
            count = starts[s + 1] - starts[s]
            for row in range(count):
                one = replace(
                    meta, query_start=torch.tensor([0, 1], dtype=torch.int32),
                    seq_lens=torch.tensor([seq_len - count + row + 1], dtype=torch.int32),
                    block_table=meta.block_table[s : s + 1],
                )  # fmt: skip
                place = slice(starts[s] + row, starts[s] + row + 1)
                out[place] = Ops.attention(self, q[place].clone(), cache, one, scale, window)
        return out
