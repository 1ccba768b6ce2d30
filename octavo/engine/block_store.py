"""Moves blocks of the KV cache within the device and between it and slots of host memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.backends.base import Device, KVCache, allocating
from octavo.backends.cpu.memory import lazy_zeros
from octavo.engine.plan import COPY, SAVE, Move

PROBES = 3
Bytes = npt.NDArray[np.uint8]


class BlockStore:
    """Every rank has one, for its own share of each block. Implements `tiers.HostMemory`."""

    def __init__(self, device: Device, layers: Sequence[list[KVCache]], num_slots: Sequence[int]) -> None:
        """`layers`: of each KV group, those that share its block table. A slot takes no memory before it is written.

        Raises NotEnoughMemory.
        """
        kind = _HostBlocks if device.shares_host_memory else _DeviceBlocks
        self._blocks: list[_HostBlocks | _DeviceBlocks] = [kind(device, mine) for mine in layers]
        self.num_slots = tuple(num_slots)
        self.block_bytes = tuple(blocks.num_bytes for blocks in self._blocks)
        self.seconds = 0.0
        """that the last moves took"""
        with allocating("KV blocks on the host", "lower --kv-offloading-size"):
            shapes = zip(num_slots, self.block_bytes, strict=True)
            self._slots = [lazy_zeros(shape, torch.uint8) for shape in shapes]

    def view(self, group: int, slot: int) -> memoryview:
        return self._slots[group][slot].numpy().data

    def do(self, moves: Iterable[Move]) -> None:
        """Makes these moves in order, and notes how long they took."""
        begin = time.perf_counter()
        for move in moves:
            blocks, slots = self._blocks[move.group], self._slots[move.group]
            if move.kind == COPY:
                blocks.copy(move.source, move.target)
            elif move.kind == SAVE:
                blocks.read(move.source, slots[move.target])
            else:
                blocks.write(move.target, slots[move.source])
        self.seconds = time.perf_counter() - begin

    def probe(self) -> tuple[int, float]:
        """(bytes, seconds) of a first few moves to the host; changes nothing on the device."""
        self.do([Move(SAVE, group, 0, 0) for group in range(len(self.num_slots))] * PROBES)
        return PROBES * sum(self.block_bytes), self.seconds


class _DeviceBlocks:
    """The blocks of one group's layers, by the device's own transfers."""

    def __init__(self, device: Device, layers: list[KVCache]) -> None:
        self._device, self._layers = device, layers
        self._sizes = [device.block_bytes(layer) for layer in layers]
        self.num_bytes = sum(self._sizes)

    def copy(self, source: int, target: int) -> None:
        for layer in self._layers:
            self._device.copy_block(layer, source, target)

    def read(self, block: int, slot: torch.Tensor) -> None:
        for layer, part in zip(self._layers, torch.split(slot, self._sizes), strict=True):
            self._device.read_block(layer, block, part)

    def write(self, block: int, slot: torch.Tensor) -> None:
        for layer, part in zip(self._layers, torch.split(slot, self._sizes), strict=True):
            self._device.write_block(layer, block, part)


class _HostBlocks:
    """The same bytes, where the device's memory is the host's: a fifth of the time (30 layers of 12 KiB a block), as
    a copy by torch costs the more the smaller it is."""

    def __init__(self, device: Device, layers: list[KVCache]) -> None:
        self._rows: list[Bytes] = [row for layer in layers for row in (_bytes(layer.k), _bytes(layer.v))]
        ends = np.cumsum([row.shape[1] for row in self._rows]).tolist()
        self._parts = [slice(end - row.shape[1], end) for row, end in zip(self._rows, ends, strict=True)]
        self.num_bytes = int(ends[-1])

    def copy(self, source: int, target: int) -> None:
        for row in self._rows:
            row[target] = row[source]

    def read(self, block: int, slot: torch.Tensor) -> None:
        out: Any = slot.numpy()
        for row, part in zip(self._rows, self._parts, strict=True):
            out[part] = row[block]

    def write(self, block: int, slot: torch.Tensor) -> None:
        data: Any = slot.numpy()
        for row, part in zip(self._rows, self._parts, strict=True):
            row[block] = data[part]


def _bytes(pages: torch.Tensor) -> Bytes:
    """[pages, bytes] over the same memory."""
    found: Bytes = pages.view(len(pages), -1).view(torch.uint8).numpy()
    return found
