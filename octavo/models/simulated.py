"""A decoder that computes nothing, for the `sim` device: it has the sizes of a model, and takes a time from them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from octavo.backends.base import AttentionMeta, ForwardBatch, KVCache
from octavo.backends.kv import KVFormat, KVGroup, KVSpec, SlidingWindow, group_layers
from octavo.backends.sim.device import SimDevice
from octavo.models.checkpoint import Checkpoint
from octavo.models.spec import check_divisible

TOKEN_MIX, POSITION_MIX = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D
"""odd multipliers (Marsaglia's and Knuth's) that spread token and position over 64 bits"""


class SimulatedDecoder:
    """One rank's share of a model. Hidden states are one int64 a token, and logits the same one for every token id.

    Raises UsageError if the ranks cannot share the model evenly, NotEnoughMemory if its weights do not fit.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: SimDevice, dtype: torch.dtype, ranks: int,
        quantized: KVFormat | None = None,
    ) -> None:  # fmt: skip
        spec = checkpoint.spec
        check_divisible(spec, ranks)
        self.kv_groups: tuple[KVGroup, ...] = group_layers(spec.kv_specs(spec.num_kv_heads // ranks))
        self._device, self._itemsize, self._vocab_size = device, dtype.itemsize, spec.vocab_size
        self._query_width = spec.num_heads * spec.head_dim // ranks
        elements = {p.name: sum(prod(part.shape) for part in p.parts) / ranks for p in checkpoint.parameters.values()}
        self._layer_elements = sum(count for name, count in elements.items() if name.startswith("layers."))
        self._output_elements = spec.vocab_size * spec.hidden_size / ranks
        self.weights_bytes = int(sum(elements.values())) * dtype.itemsize
        device.hold(self.weights_bytes)
        page = device.default_page_size
        self._kv_token_bytes = [
            len(g.layers) * device.kv_bytes_per_page(g.spec, page, dtype, quantized) / page for g in self.kv_groups
        ]

    def forward(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Tensor:
        flops = 2 * self._layer_elements * batch.token_ids.shape[0]
        read_bytes = self._layer_elements * self._itemsize
        for group, meta, token_bytes in zip(self.kv_groups, batch.attention, self._kv_token_bytes, strict=True):
            pairs, positions = _attended(meta, group.spec)
            flops += 4 * pairs * self._query_width * len(group.layers)
            read_bytes += positions * token_bytes
        self._device.compute(flops, read_bytes)
        return (batch.token_ids * TOKEN_MIX + batch.positions * POSITION_MIX).unsqueeze(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, 1] to int64 [R, V], which takes no memory; the time is that of the output matrix."""
        self._device.compute(2 * self._output_elements * hidden.shape[0], self._output_elements * self._itemsize)
        return hidden.expand(-1, self._vocab_size)


def _attended(meta: AttentionMeta, spec: KVSpec) -> tuple[float, float]:
    """Pairs of a query and a key that it sees, and positions whose keys and values are read, of the whole step."""
    lens, starts = meta.seq_lens.numpy(), meta.query_start.numpy()
    if starts[-1] == len(lens):  # one query a sequence
        seen = float((lens.clip(max=spec.window) if isinstance(spec, SlidingWindow) else lens).sum())
        return seen, seen
    lens = lens.astype(float)
    queries = starts[1:] - starts[:-1]
    if isinstance(spec, SlidingWindow):
        return float(queries @ lens.clip(max=spec.window)), float(lens.clip(max=spec.window - 1 + queries).sum())
    return float(queries @ (lens - (queries - 1) / 2)), float(lens.sum())
