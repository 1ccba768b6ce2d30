"""What one layer keeps in the KV cache, and which layers share a block table. No torch here: the scheduler reads it."""

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
