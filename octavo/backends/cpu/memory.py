"""Memory for weights and KV: anonymous mappings in huge pages, that cost nothing until they are written."""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor

CHUNK_BYTES = 256 << 20
ALIGNMENT = 64


def _map(size: int) -> mmap.mmap:
    # Private: shared anonymous memory would get no huge pages.
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return area


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory page by page as they are written."""
    count = prod(shape)
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_map(count * dtype.itemsize), dtype=dtype).view(shape)


class Arena:
    """Hands out pieces of large mappings, so that small matrices share huge pages. A mapping lives as long as any
    piece of it; pieces are never reused."""

    def __init__(self) -> None:
        self._area: mmap.mmap | None = None
        self._size = self._used = 0

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements, aligned to 64 bytes."""
        size = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if self._area is None or self._used + size > self._size:
            self._size = max(CHUNK_BYTES, size)
            self._area, self._used = _map(self._size), 0
        piece = torch.frombuffer(self._area, dtype=dtype, count=count, offset=self._used)
        self._used += size
        return piece
