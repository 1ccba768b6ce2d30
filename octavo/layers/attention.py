"""Self-attention with grouped queries and rotary positions over a paged cache."""

from __future__ import annotations

from torch import Tensor

from octavo.backends.base import AttentionMeta, KVCache
from octavo.backends.reference import Ops
from octavo.layers.linear import Linear, RowLinear


class Attention:
    """`qkv` gives this rank's query heads, then its key heads, then as many value heads."""

    def __init__(
        self,
        ops: Ops,
        qkv: Linear,
        output: RowLinear,
        rope_table: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
    ) -> None:
        self.ops, self.qkv, self.output, self.rope_table = ops, qkv, output, rope_table
        self.num_heads, self.num_kv_heads, self.head_dim, self.window = num_heads, num_kv_heads, head_dim, window
        self.scale = head_dim**-0.5

    def __call__(self, x: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMeta) -> Tensor:
        """x [T, H] to [T, H]; writes the new keys and values into the cache."""
        ops, heads, rotated = self.ops, self.num_heads, self.num_heads + self.num_kv_heads
        tokens = x.shape[0]
        qkv = self.qkv(x).view(tokens, rotated + self.num_kv_heads, self.head_dim)
        qk = ops.rope(qkv[:, :rotated], positions, self.rope_table)
        ops.write_kv(qk[:, heads:], qkv[:, rotated:], cache, meta)
        out = ops.attention(qk[:, :heads], cache, meta, self.scale, self.window)
        return self.output(out.view(tokens, heads * self.head_dim))
