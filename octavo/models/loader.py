"""From a checkpoint on disk to a decoder on a device: one parameter at a time, each rank its share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.backends.base import Device, allocating
from octavo.backends.codes import SMALLEST
from octavo.backends.reference import PackedLinear
from octavo.config import GIB
from octavo.dist.group import SINGLE, Group
from octavo.errors import BadModelFile, NotEnoughMemory
from octavo.models.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.models.parameters import Parameter, Part
from octavo.models.rope import rope_table
from octavo.models.spec import check_divisible
from octavo.quant.gguf_blocks import read_into

Progress = Callable[[str, int, int], None]
"""stage, bytes done, bytes in all (of the files)"""
_MORE_MEMORY = "use a smaller model or dtype, free memory, or raise --tensor-parallel-size"


def load_model(
    checkpoint: Checkpoint,
    device: Device,
    dtype: torch.dtype,
    group: Group = SINGLE,
    progress: Progress | None = None,
    max_positions: int | None = None,
) -> Decoder:
    """The checkpoint's model with weights in `dtype`; positions below `max_positions` (all when None) can be used.

    Raises UsageError if the ranks cannot share the model evenly, NotEnoughMemory if its weights do not fit,
    BadModelFile if one of them is no number.
    """
    spec = checkpoint.spec
    check_divisible(spec, group.size)
    weights = _CheckpointWeights(checkpoint, device, dtype, group, progress)
    _check_memory(weights, device)
    with allocating("the weights", _MORE_MEMORY):
        table = device.upload(rope_table(spec.rope, max_positions or spec.context_len))
        decoder = Decoder(spec, device.ops, weights, table, group)
    decoder.weights_bytes = weights.held_bytes()
    decoder.kv_scales = _kv_scales(checkpoint, group)
    return decoder


class _CheckpointWeights:
    """`decoder.Weights` read from a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, device: Device, dtype: torch.dtype, group: Group, progress: Progress | None
    ) -> None:
        self.checkpoint, self.device, self.dtype, self.group, self.progress = checkpoint, device, dtype, group, progress
        self.parameters = checkpoint.parameters
        used = {part.tensor for parameter in self.parameters.values() for part in parameter.parts}
        self.total_bytes = sum(checkpoint.tensors[name].nbytes for name in used)
        self.done_bytes = 0
        self._held: dict[int, int] = {}
        self._embedding: Tensor | None = None

    def tensor(self, name: str) -> Tensor:
        loaded = self._keep(self._load(self.parameters[name]))
        if name == "embed.weight":
            self._embedding = loaded
        return loaded

    def linear(self, name: str, bias: bool) -> PackedLinear:
        weight = self.parameters[f"{name}.weight"]
        offset = None
        if bias and (weight.shard != "in" or self.group.rank == 0):
            offset = self._load(self.parameters[f"{name}.bias"])
        return self._pack(self._load(weight), offset)

    def output_matrix(self) -> PackedLinear:
        if self.checkpoint.spec.tie_embeddings:
            assert self._embedding is not None, "the embedding is loaded first"
            return self._pack(self._embedding, None)
        return self._pack(self._load(self.parameters["lm_head.weight"]), None)

    def rank_bytes(self) -> int:
        """What this rank's weights take in `dtype`."""
        return sum(
            rows * columns * self.dtype.itemsize
            for parameter in self.parameters.values()
            for rows, columns in [self._rank_size(parameter)]
        )

    def held_bytes(self) -> int:
        """Bytes of the tensors handed out, those that share memory counted once."""
        return sum(self._held.values())

    def _pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        packed = self.device.ops.pack_linear(weight, bias)
        for tensor in (*packed.data, *([packed.bias] if packed.bias is not None else [])):
            self._keep(tensor)
        return packed

    def _keep(self, tensor: Tensor) -> Tensor:
        self._held[tensor.data_ptr()] = tensor.nbytes
        return tensor

    def _rank_size(self, parameter: Parameter) -> tuple[int, int]:
        rows = sum(self._share(parameter, part)[0] for part in parameter.parts)
        return rows, self._share(parameter, parameter.parts[0])[1]

    def _share(self, parameter: Parameter, part: Part) -> tuple[int, int]:
        """Rows and columns of a part on this rank; vectors count as one column."""
        rows, columns = part.shape[0], part.shape[1] if len(part.shape) > 1 else 1
        if parameter.shard == "out":
            return rows // self.group.size, columns
        if parameter.shard == "vocab":
            return -(-rows // self.group.size), columns
        return rows, columns // self.group.size if parameter.shard == "in" else columns

    def _load(self, parameter: Parameter) -> Tensor:
        """This rank's share of a parameter, its parts stacked, on the device."""
        rows, columns = self._rank_size(parameter)
        vector = len(parameter.parts[0].shape) == 1
        out = torch.empty((rows,) if vector else (rows, columns), dtype=self.dtype)
        first = 0
        for part in parameter.parts:
            count = self._share(parameter, part)[0]
            rows_of_part = out[first : first + count]
            self._read_part(rows_of_part, parameter, part)
            self._check_finite(rows_of_part, part)
            first += count
            self.done_bytes += self.checkpoint.tensors[part.tensor].nbytes
        if self.progress is not None:
            self.progress("loading weights", self.done_bytes, self.total_bytes)
        return self.device.upload(out)

    def _read_part(self, out: Tensor, parameter: Parameter, part: Part) -> None:
        kind = self.checkpoint.tensors[part.tensor].type
        rank, count = self.group.rank, out.shape[0]
        if parameter.shard == "in" and self.group.size > 1:
            whole = torch.empty(part.shape, dtype=self.dtype)
            read_into(whole, self.checkpoint.rows(part.tensor), kind)
            columns = out.shape[1]
            out.copy_(whole[:, rank * columns : (rank + 1) * columns])
            return
        start = rank * count if parameter.shard in ("out", "vocab") else 0
        filled = max(0, min(count, part.shape[0] - start))
        if filled:
            read_into(out[:filled], self.checkpoint.rows(part.tensor, start, start + filled), kind)
        out[filled:].zero_()

    def _check_finite(self, values: Tensor, part: Part) -> None:
        """Raises BadModelFile naming the tensor: one such number makes every answer that it touches nonsense.

        A sum takes 10 ms for SmolLM2, 2% of its load on 2 cores. Asking each number, which tells an overflow of the
        sum apart, takes far longer.
        """
        if not values.sum().isfinite() and not values.isfinite().all():
            raise BadModelFile(
                f"{self.checkpoint.path}: tensor {part.tensor!r} holds NaN, infinity, or more than "
                f"{str(self.dtype).removeprefix('torch.')} can", fix="fetch or convert the model again",
            )  # fmt: skip


def _kv_scales(checkpoint: Checkpoint, group: Group) -> dict[int, tuple[Tensor, Tensor]]:
    heads = checkpoint.spec.num_kv_heads
    share = slice(group.rank * heads // group.size, (group.rank + 1) * heads // group.size)

    def read(name: str) -> Tensor:
        stored, info = checkpoint.stored[name], checkpoint.tensors[name]
        scales = torch.empty(math.prod(info.shape))
        read_into(scales, stored.file.data(stored.name), info.type)
        if not (scales.isfinite() & (scales >= SMALLEST)).all():
            raise BadModelFile(
                f"{checkpoint.path}: tensor {name!r} holds {scales.min():g}", limit="scales above 0",
                fix="fetch or convert the model again",
            )  # fmt: skip
        return scales.expand(heads)[share]

    return {layer: (read(k), read(v)) for layer, (k, v) in checkpoint.kv_scales.items()}


def _check_memory(weights: _CheckpointWeights, device: Device) -> None:
    needed, (_, free) = weights.rank_bytes(), device.memory()
    if needed > free:
        name = str(weights.dtype).removeprefix("torch.")
        raise NotEnoughMemory(
            f"the weights need {needed / GIB:.2f} GiB in {name}", limit=f"{free / GIB:.2f} GiB are free",
            fix=_MORE_MEMORY,
        )  # fmt: skip
