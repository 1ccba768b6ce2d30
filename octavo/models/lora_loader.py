"""From an adapter on disk to low-rank weights beside a decoder's linears: each rank its share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.backends.base import Device, allocating
from octavo.backends.reference import PackedLinear
from octavo.config import GIB
from octavo.dist.group import Group
from octavo.errors import BadModelFile, NotEnoughMemory
from octavo.layers.lora import LinearAdapters, LowRank
from octavo.models.decoder import Decoder
from octavo.models.lora import AdapterFile, Target
from octavo.models.parameters import Parameter
from octavo.quant.gguf_blocks import read_into

_MORE_MEMORY = "unload another adapter, or free memory"


class AdapterLoader:
    """Loads adapters into a decoder, by number, and takes them out again; not while it computes."""

    def __init__(
        self, decoder: Decoder, parameters: Mapping[str, Parameter], device: Device, dtype: torch.dtype, group: Group
    ) -> None:
        """`parameters` are those of the decoder's checkpoint."""
        self.parameters, self.device, self.dtype, self.group = parameters, device, dtype, group
        self.linears: dict[str, LinearAdapters] = {}
        for name, linear in decoder.linears().items():
            self.linears[name] = linear.adapters = LinearAdapters(device.ops, decoder.step_adapters)

    def load(self, number: int, adapter: AdapterFile) -> None:
        """All of it or nothing. Raises NotEnoughMemory, or BadModelFile for a value that is no number."""
        needed, (_, free) = self.rank_bytes(adapter), self.device.memory()
        if needed > free:
            raise NotEnoughMemory(
                f"the adapter needs {needed / GIB:.2f} GiB", limit=f"{free / GIB:.2f} GiB are free", fix=_MORE_MEMORY
            )
        with allocating("the adapter", _MORE_MEMORY):
            made = {name: self._low_rank(adapter, name, targets) for name, targets in adapter.targets.items()}
        for name, low_rank in made.items():
            self.linears[name.removesuffix(".weight")].loaded[number] = low_rank

    def unload(self, number: int) -> None:
        for linear in self.linears.values():
            linear.loaded.pop(number, None)

    def rank_bytes(self, adapter: AdapterFile) -> int:
        """What this rank's share takes."""
        total = 0
        for name, targets in adapter.targets.items():
            rows, columns = self._shape(self.parameters[name])
            total += sum(target.rank for target in targets) * (rows + columns) * self.dtype.itemsize
        return total

    def _shape(self, parameter: Parameter) -> tuple[int, int]:
        """Of this rank's share of a stacked weight."""
        rows, columns = sum(part.shape[0] for part in parameter.parts), parameter.parts[0].shape[1]
        ranks = self.group.size
        return (rows // ranks, columns) if parameter.shard == "out" else (rows, columns // ranks)

    def _low_rank(self, adapter: AdapterFile, name: str, targets: tuple[Target, ...]) -> LowRank:
        parameter = self.parameters[name]
        assert parameter.shard in ("out", "in"), parameter
        rows, columns = self._shape(parameter)
        width = sum(target.rank for target in targets)
        down, up = torch.empty(width, columns, dtype=self.dtype), torch.zeros(rows, width, dtype=self.dtype)
        first = 0
        for target in targets:
            last = first + target.rank
            a, b = self._read(adapter, target.a, 1.0), self._read(adapter, target.b, target.scale)
            before = sum(part.shape[0] for part in parameter.parts[: target.part])
            if parameter.shard == "out":
                b, before = self._mine(b, 0), before // self.group.size
            else:
                a = self._mine(a, 1)
            down[first:last] = a
            up[before : before + b.shape[0], first:last] = b
            first = last
        return LowRank(self._pack(down), self._pack(up))

    def _read(self, adapter: AdapterFile, tensor: str, scale: float) -> Tensor:
        """All of it, so that every rank finds the same fault. Scaled in float32 and rounded once."""
        info = adapter.file.tensors[tensor]
        wide = torch.empty(info.shape)
        read_into(wide, adapter.file.data(tensor), info.type)
        whole = wide.mul_(scale).to(self.dtype)
        if not whole.isfinite().all():
            raise BadModelFile(
                f"{adapter.path}: tensor {tensor!r} holds NaN, infinity, or more than "
                f"{str(self.dtype).removeprefix('torch.')} can", fix="train or export the adapter again",
            )  # fmt: skip
        return whole

    def _mine(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self.group.size, dim)[self.group.rank]

    def _pack(self, weight: Tensor) -> PackedLinear:
        return self.device.ops.pack_linear(self.device.upload(weight), None, lasting=False)
