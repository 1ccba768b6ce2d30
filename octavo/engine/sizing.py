"""How many KV blocks there will be: asked for in blocks or bytes, or a share of what memory is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch

from octavo.backends.base import Device
from octavo.backends.kv import KVFormat, KVGroup
from octavo.config import GIB, EngineConfig
from octavo.engine.draft_model import place_layers, spare_blocks
from octavo.engine.pages import KVLayout, peak_blocks
from octavo.errors import NotEnoughMemory, UsageError

CPU_KV_BYTES = 4 * GIB
CPU_KV_SHARE = 0.5
"""On a host others need memory too: without a word from the user, at most 4 GiB or half of what is free."""
DEVICE_UTILIZATION = 0.9
KNOBS = "lower --max-model-len, or raise --kv-cache-memory-bytes or --gpu-memory-utilization"


@dataclass(frozen=True)
class Sizing:
    layout: KVLayout
    max_model_len: int
    kv_cache_bytes: int
    """of one rank"""
    warning: str | None
    """to be told to the user, where the context had to be cut"""
    host_slots: tuple[int, ...]
    """blocks of each KV group that host memory may hold; 0 for all without a host tier"""


def choose_page_size(config: EngineConfig, device: Device) -> int:
    page_size = config.block_size or device.default_page_size
    if page_size % device.page_multiple:
        raise UsageError(
            f"--block-size {page_size} does not suit the device {device.name}",
            limit=f"a multiple of {device.page_multiple}", fix=f"use {device.default_page_size}", param="block_size",
        )  # fmt: skip
    return page_size


def kv_budget(config: EngineConfig, device: Device, num_ranks: int) -> tuple[int, str]:
    """(bytes that this rank may spend on the KV cache, where that number is from)."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
    total, free = device.memory()
    shared_host = device.shares_host_memory
    utilization = config.gpu_memory_utilization
    if shared_host and utilization is None:
        budget, reason = min(CPU_KV_BYTES, int(free * CPU_KV_SHARE)), f"of {_gib(free)} free memory"
    else:
        utilization = DEVICE_UTILIZATION if utilization is None else utilization
        budget = int(total * utilization) - (total - free)
        reason = f"{utilization:g} of {_gib(total)} memory, less {_gib(total - free)} in use"
    return max(0, budget) // (num_ranks if shared_host else 1), reason


def size_kv(
    config: EngineConfig, device: Device, groups: tuple[KVGroup, ...], dtype: torch.dtype, budget: int, reason: str,
    quantized: KVFormat | None = None, draft: tuple[KVGroup, ...] = (),
) -> Sizing:  # fmt: skip
    """Cuts `budget` bytes into blocks, never more than `max_num_seqs` longest sequences need; a block holds what the
    layers of a `draft` model keep, too.

    The context shrinks, and `warning` says so, where memory is short and the user did not name a length. Raises
    NotEnoughMemory where they did, or where not even one block fits.
    """
    page_size = choose_page_size(config, device)
    page_bytes = [len(g.layers) * device.kv_bytes_per_page(g.spec, page_size, dtype, quantized) for g in groups]
    spare_bytes = 0
    for own in place_layers(draft, [g.spec for g in groups]):
        own_bytes = len(own.layers) * device.kv_bytes_per_page(own.spec, page_size, dtype, quantized)
        page_bytes[own.group] += own_bytes
        spare_bytes += config.max_num_seqs * spare_blocks(config.speculative_config, page_size) * own_bytes
    longest = -(-config.max_model_len // page_size)
    peaks = [peak_blocks(g.spec, page_size, config.max_model_len, config.max_num_batched_tokens) for g in groups]

    def split(blocks: int) -> tuple[int, ...]:
        """Blocks of each group when one with full attention has `blocks`; windows never need more than they reach."""
        needed = [blocks if peak == longest else config.max_num_seqs * peak for peak in peaks]
        return tuple(min(blocks, count) for count in needed)

    def cost(blocks: int) -> int:
        return spare_bytes + sum(count * size for count, size in zip(split(blocks), page_bytes, strict=True))

    blocks = config.num_gpu_blocks_override
    if blocks is not None:
        budget, reason = device.memory()[1], f"--num-gpu-blocks-override {blocks}"
        if cost(blocks) > budget:
            raise NotEnoughMemory(f"{reason} needs {_gib(cost(blocks))}", limit=f"{_gib(budget)} free", fix="lower it")
    else:
        blocks = _most(config.max_num_seqs * longest, cost, budget)
    if blocks == 0:
        raise NotEnoughMemory(
            f"not one KV block of {page_size} tokens fits: it needs {cost(1)} bytes",
            limit=f"{budget} bytes ({reason})", fix=KNOBS,
        )  # fmt: skip
    max_model_len, warning = config.max_model_len, None
    if blocks < longest:
        if config.max_model_len_asked:
            raise NotEnoughMemory(
                f"one sequence of --max-model-len {max_model_len} needs {longest} KV blocks of {page_size} tokens, "
                f"{_gib(cost(longest))}",
                limit=f"{blocks} blocks, {_gib(budget)} ({reason})", fix=KNOBS,
            )  # fmt: skip
        max_model_len = blocks * page_size
        warning = (
            f"the context is cut from {config.max_model_len} to {max_model_len} tokens: {blocks} KV blocks fit into "
            f"{_gib(budget)} ({reason}); to change it: {KNOBS}"
        )
    layout = KVLayout(page_size, tuple(g.spec for g in groups), split(blocks))
    slots = host_slots(config, device, layout.num_blocks, page_bytes)
    return Sizing(layout, max_model_len, cost(blocks), warning, slots)


def host_slots(
    config: EngineConfig, device: Device, num_blocks: Sequence[int], block_bytes: Sequence[int]
) -> tuple[int, ...]:
    """Slots of each KV group in one rank's share of host memory, in the proportion in which the device has blocks.

    Raises NotEnoughMemory where not even one of each fits, or where the host has not that much memory.
    """
    if config.kv_offloading_bytes == 0:
        return (0,) * len(num_blocks)
    asked, ranks = config.kv_offloading_bytes, config.tensor_parallel_size
    on_device = sum(n * size for n, size in zip(num_blocks, block_bytes, strict=True))
    needed, free = asked, psutil.virtual_memory().available
    if device.shares_host_memory:
        needed, free = asked + on_device * ranks, device.memory()[1]
    if needed > free:
        raise NotEnoughMemory(
            f"--kv-offloading-size asks for {_gib(asked)}, {_gib(needed)} with the KV cache itself",
            limit=f"{_gib(free)} of host memory are free", fix="lower it",
        )  # fmt: skip
    slots = tuple(n * (asked // ranks) // on_device for n in num_blocks)
    if not all(slots):
        raise NotEnoughMemory(
            f"--kv-offloading-size is {asked} bytes, in which not one KV block of each kind fits",
            limit=f"at least {ranks * -(-on_device // min(num_blocks))} bytes", fix="raise it, or leave it out",
        )  # fmt: skip
    return slots


def _most(high: int, cost: Callable[[int], int], budget: int) -> int:
    """The largest count up to `high` that costs at most `budget`; cost rises with the count."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle - 1)
    return low


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
