"""Moves blocks of the KV cache within the device and between it and slots of host memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from octavo.backends.base import Device, KVCache, allocating
from octavo.backends.cpu.memory import lazy_zeros
from octavo.backends.kv import KVGroup
from octavo.engine.plan import COPY, SAVE, Move

PROBES = 3


def host_slots(host_bytes: int, num_blocks: Sequence[int], block_bytes: Sequence[int]) -> tuple[int, ...]:
    """Slots of each KV group that fit into `host_bytes`, in the proportion in which the device has blocks of them."""
    device_bytes = sum(n * size for n, size in zip(num_blocks, block_bytes, strict=True))
    return tuple(n * host_bytes // device_bytes for n in num_blocks)


class BlockStore:
    """Every rank has one, for its own share of each block. Implements `tiers.HostMemory`."""

    def __init__(
        self, device: Device, groups: Sequence[KVGroup], caches: Sequence[KVCache], num_slots: Sequence[int]
    ) -> None:
        """`caches`: one a layer, in layer order. A slot takes no memory before it is first written.

        Raises NotEnoughMemory.
        """
        self._device = device
        self._caches = [[caches[layer] for layer in group.layers] for group in groups]
        self._layer_bytes = [device.block_bytes(layers[0]) for layers in self._caches]
        self.num_slots = tuple(num_slots)
        self.block_bytes = tuple(
            len(layers) * size for layers, size in zip(self._caches, self._layer_bytes, strict=True)
        )
        with allocating("KV blocks on the host", "lower --kv-offloading-size"):
            shapes = zip(num_slots, self.block_bytes, strict=True)
            self._slots = [lazy_zeros(shape, torch.uint8) for shape in shapes]

    def view(self, group: int, slot: int) -> memoryview:
        return self._slots[group][slot].numpy().data

    def do(self, moves: Iterable[Move]) -> float:
        """Makes these moves in order; the seconds that they took."""
        begin = time.perf_counter()
        for move in moves:
            for cache, part in zip(self._caches[move.group], self._parts(move), strict=True):
                if move.kind == COPY:
                    self._device.copy_block(cache, move.source, move.target)
                elif move.kind == SAVE:
                    self._device.read_block(cache, move.source, part)
                else:
                    self._device.write_block(cache, move.target, part)
        return time.perf_counter() - begin

    def _parts(self, move: Move) -> Sequence[Tensor]:
        """The piece of the host slot for each layer; of no meaning for a copy within the device."""
        layers, size = len(self._caches[move.group]), self._layer_bytes[move.group]
        if move.kind == COPY:
            return [torch.empty(0)] * layers
        slot = move.target if move.kind == SAVE else move.source
        return self._slots[move.group][slot].view(layers, size).unbind()

    def probe(self) -> tuple[int, float]:
        """(bytes, seconds) of a first few moves to the host; changes nothing on the device."""
        if not all(self.num_slots):
            return 0, 0.0
        moves = [Move(SAVE, group, 0, 0) for group in range(len(self.num_slots))] * PROBES
        return PROBES * sum(self.block_bytes), self.do(moves)
