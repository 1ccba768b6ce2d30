"""The CPU: bf16 on the C++ kernels, everything else, or all of it where the kernels are missing, on the reference."""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from octavo.backends.base import Device, KVCache
from octavo.backends.codes import CodedKVCache
from octavo.backends.cpu import lib, limits
from octavo.backends.cpu.memory import lazy_zeros
from octavo.backends.cpu.ops import CpuOps, PanelKVCache, panel_bytes, supports_head
from octavo.backends.kv import KVFormat, KVSpec, LatentAttention
from octavo.backends.reference import Ops
from octavo.backends.row_by_row import reference_ops

log = logging.getLogger(__name__)


class CpuDevice(Device):
    """`kernels` names the instruction set in use, or "reference"."""

    name = "cpu"
    default_page_size = 16
    page_multiple = 16
    dtypes = (torch.bfloat16, torch.float32)
    dist_backend = "gloo"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.ops = Ops()

    def open(self, rank: int, threads: int | None) -> None:
        """`threads` None: as many as the system lets us use. `OCTAVO_CPU_PIN=1` binds each to one CPU."""
        count = threads or limits.default_threads()
        library, kernels = lib.load(), lib.kernels()
        if library is None or kernels is None:
            log.warning("the CPU kernels are not built (pip install . builds them): running on plain torch, slowly")
            self.ops = reference_ops()
            torch.set_num_threads(count)
            return
        library.set_threads(count, pin=os.environ.get("OCTAVO_CPU_PIN") == "1")
        torch.set_num_threads(1)  # two pools on the same cores would slow each other down
        self.ops, self.kernels = CpuOps(kernels), kernels.isa

    def upload(self, host: Tensor) -> Tensor:
        return host

    def download(self, tensor: Tensor) -> Tensor:
        return tensor

    def memory(self) -> tuple[int, int]:
        return limits.memory()

    def kv_bytes_per_page(
        self, spec: KVSpec, page_size: int, dtype: torch.dtype, quantized: KVFormat | None = None
    ) -> int:
        if self._in_panels(spec, dtype):
            assert not isinstance(spec, LatentAttention)
            return sum(panel_bytes(spec, page_size, quantized))
        return super().kv_bytes_per_page(spec, page_size, dtype, quantized)

    def allocate_kv(
        self, spec: KVSpec, num_pages: int, page_size: int, dtype: torch.dtype, quantized: KVFormat | None = None
    ) -> KVCache:
        assert not isinstance(spec, LatentAttention), "no family with latent attention exists yet"
        if self._in_panels(spec, dtype):
            return PanelKVCache(spec, num_pages, page_size, quantized)
        if quantized is not None:
            return CodedKVCache(spec, num_pages, page_size, quantized, lazy_zeros)
        shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        return KVCache(lazy_zeros(shape, dtype), lazy_zeros(shape, dtype), page_size)

    def _in_panels(self, spec: KVSpec, dtype: torch.dtype) -> bool:
        kernels = isinstance(self.ops, CpuOps) and dtype is torch.bfloat16
        return kernels and not isinstance(spec, LatentAttention) and supports_head(spec.head_dim)
