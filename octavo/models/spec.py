"""What a decoder-only model is, as plain values. No torch: the API process and the planner read it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.backends.kv import FullAttention, KVSpec, SlidingWindow
from octavo.errors import BadModelFile, UsageError


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: `theta` is the base, `rotary_dim` the channels rotated; `scaling` as named below."""

    theta: float
    rotary_dim: int
    scaling: Literal["none", "linear", "llama3", "yarn", "factors"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the ends of the ramp are rounded to whole channels"""
    factors: tuple[float, ...] = ()
    """with scaling "factors": what each of the rotary_dim / 2 frequencies is divided by"""


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder with gated MLP. Sizes are of the whole model, before tensor parallelism."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    context_len: int
    rope: RopeSpec
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """sliding window of each layer, None for full attention; empty when all are full"""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def kv_specs(self, num_kv_heads: int | None = None) -> tuple[KVSpec, ...]:
        """One a layer; `num_kv_heads` of a rank, if given."""
        heads = num_kv_heads or self.num_kv_heads
        return tuple(
            FullAttention(heads, self.head_dim) if (w := self.window(i)) is None
            else SlidingWindow(heads, self.head_dim, w)
            for i in range(self.num_layers)
        )  # fmt: skip


def check_divisible(spec: DecoderSpec, size: int) -> None:
    """Raises UsageError unless heads and the MLP split evenly over `size` ranks."""
    shared = {
        "attention heads": spec.num_heads,
        "key-value heads": spec.num_kv_heads,
        "intermediate size": spec.intermediate_size,
    }
    uneven = [f"{value} {name}" for name, value in shared.items() if value % size]
    if uneven:
        fits = [n for n in range(1, min(shared.values()) + 1) if not any(value % n for value in shared.values())]
        raise UsageError(
            f"--tensor-parallel-size {size} does not divide the model's {', '.join(uneven)}",
            fix=f"use {' or '.join(map(str, fits))}", param="tensor_parallel_size",
        )  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """One checkpoint tensor and where it goes.

    `name` and `param` may hold `{i}` for the layer. `shard` says along which axis ranks split it: "out" the output
    features (rows), "in" the input features (columns), "vocab" the rows of an embedding; None keeps it whole. Weights
    with one `param` are stacked by output features in `part` order. `optional` ones exist only with some settings.
    """

    name: str
    param: str
    shard: Literal["out", "in", "vocab"] | None = None
    part: int = 0
    optional: bool = False


class ConfigReader:
    """Reads a config dict and remembers which keys were looked at, so that an unknown one is named and not ignored.

    `source` stands in messages: the file, and the object in it.
    """

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source
        self._seen: set[str] = set()

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value, `default` when absent or null. Raises BadModelFile for another type, or absent with no default."""
        self._seen.add(key)
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise BadModelFile(f"{self.source}: {key!r} is missing", fix="use the model's own file")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000:
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(k.__name__ for k in kinds)
            shown = repr(value)[:100]
            raise BadModelFile(f"{self.source}: {key!r} is {shown}, not {wanted}", fix="use the model's own file")
        return value

    def only(self, key: str, *values: Any, fix: str = "use another model") -> None:
        """Raises BadModelFile unless the key is absent, null or one of `values`, which are all that we can do."""
        value = self.optional(key)
        if value is not None and value not in values:
            raise BadModelFile(
                f"{self.source}: {key!r} is {repr(value)[:100]}, which Octavo does not support",
                limit=" or ".join(map(repr, values)), fix=fix,
            )  # fmt: skip

    def optional(self, key: str) -> Any:
        """The value or None, of any type."""
        self._seen.add(key)
        return self.config.get(key)

    def ignore(self, *keys: str) -> None:
        """Keys that change nothing for inference here."""
        self._seen.update(keys)

    def finish(self) -> None:
        """Raises BadModelFile naming the keys that nobody read."""
        unknown = sorted(set(self.config) - self._seen)
        if unknown:
            raise BadModelFile(
                f"{self.source}: unknown key{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown[:20]))}",
                fix="the model may need what Octavo does not know; remove the keys if they change nothing",
            )
