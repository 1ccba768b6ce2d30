"""What one layer keeps in the KV cache and in which form, and which layers share a block table.

No torch here: the scheduler reads it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FullAttention:
    """Keys and values of every position: `[tokens, num_kv_heads, head_dim]` each."""

    num_kv_heads: int
    head_dim: int

    def elements_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class SlidingWindow(FullAttention):
    """A token sees itself and the `window - 1` before it; blocks out of reach may be freed."""

    window: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one compressed vector a token for all heads."""

    latent_dim: int
    rope_dim: int

    def elements_per_token(self) -> int:
        return self.latent_dim + self.rope_dim


KVSpec = FullAttention | SlidingWindow | LatentAttention
SCALE_BYTES = 4


@dataclass(frozen=True)
class KVFormat:
    """Numbers kept as 8-bit codes: number = code * scale.

    A scale is fixed for each kv head; or, with `per_token_head`, found when a token is written, one for its key and one
    for its value in each head, and kept in the same page.
    """

    name: str
    code: str
    """int8, fp8_e4m3 or fp8_e5m2 (arXiv:2209.05433)"""
    largest: float
    """code; int8 leaves -128 out"""
    per_token_head: bool = False

    def page_bytes(self, vectors: int, width: int) -> int:
        """Of so many keys (or values) of `width` channels: codes, padded to whole scales, then scales."""
        codes = -(-vectors * width // SCALE_BYTES) * SCALE_BYTES
        return codes + (SCALE_BYTES * vectors if self.per_token_head else 0)


_INT8 = KVFormat("int8_per_token_head", "int8", 127, per_token_head=True)
_FP8 = KVFormat("fp8_e4m3", "fp8_e4m3", 448)
KV_FORMATS = {
    "int8": _INT8,
    "int8_per_token_head": _INT8,
    "fp8": _FP8,
    "fp8_e4m3": _FP8,
    "fp8_e5m2": KVFormat("fp8_e5m2", "fp8_e5m2", 57344),
    "fp8_per_token_head": KVFormat("fp8_per_token_head", "fp8_e4m3", 448, per_token_head=True),
}
"""By the names that --kv-cache-dtype knows. Eight evenly spaced bits need the scale of what they hold; floating-point
codes span 2**-9 to 448, where keys and values lie."""


@dataclass(frozen=True)
class KVGroup:
    """Layers of one spec; they share a block table, since they free and fill the same positions."""

    spec: KVSpec
    layers: tuple[int, ...]


def group_layers(specs: tuple[KVSpec, ...]) -> tuple[KVGroup, ...]:
    """Groups layer indices by equal spec, in order of first appearance."""
    layers: dict[KVSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        layers.setdefault(spec, []).append(index)
    return tuple(KVGroup(spec, tuple(indices)) for spec, indices in layers.items())
