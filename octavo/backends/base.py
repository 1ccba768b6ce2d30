"""A device as the engine sees it: memory and transfers (`Device`), arithmetic (`Ops`), and what a step hands to them.

`Ops` has a plain-torch default for every operation in `reference.py`; a backend overrides what it does better.
Shapes: T tokens of the step, S sequences in it, R sampled rows, V vocabulary.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.backends.kv import KVFormat, KVSpec, LatentAttention
from octavo.backends.names import DEVICES, check_device
from octavo.errors import NotEnoughMemory

if TYPE_CHECKING:
    from octavo.backends.reference import Ops


@dataclass(frozen=True)
class AttentionMeta:
    """Where one KV group's tokens of this step lie. Built once a step for each group, shared by its layers.

    Sequence s owns query rows `query_start[s]:query_start[s+1]`; they are the last positions of its `seq_lens[s]`.
    Slot = block * page_size + offset in the block.
    """

    query_start: Tensor
    """int32 [S + 1]"""
    seq_lens: Tensor
    """int32 [S], tokens in the cache once this step's are written"""
    block_table: Tensor
    """int32 [S, max_blocks]; entries past a sequence's blocks are 0 and never read"""
    slots: Tensor
    """int64 [T], where each token's key and value go"""
    page_size: int


@dataclass(frozen=True)
class AdapterRows:
    """The tokens of this step that one adapter computes."""

    adapter: int
    """its number, from 1"""
    rows: Tensor | None
    """int64, ascending; None: all of them"""


@dataclass(frozen=True)
class ForwardBatch:
    """One step's input to a model."""

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    attention: tuple[AttentionMeta, ...]
    """one a KV group, in the model's group order"""
    adapters: tuple[AdapterRows, ...] = ()
    """rows that stand nowhere in it are the base model's"""


@dataclass(frozen=True)
class Penalties:
    """N rows of the logits with penalties. Row `rows[i]` has those of the distinct tokens that stand at `starts[i]` and
    the `lengths[i] - 1` places after it; tokens and counts last between steps, and hold more than a step looks at."""

    rows: Tensor
    """int64 [N], distinct"""
    starts: Tensor
    """int64 [N]"""
    lengths: Tensor
    """int64 [N]"""
    repetition: Tensor
    """float32 [N]"""
    frequency: Tensor
    """float32 [N]"""
    presence: Tensor
    """float32 [N]"""
    tokens: Tensor
    """int32 [places]"""
    counts: Tensor
    """float32 [places], times the token stands in the output so far"""


@dataclass(frozen=True)
class Mask:
    """Which tokens some rows of the logits may have at all."""

    rows: Tensor
    """int64 [M], distinct rows of the logits"""
    bits: Tensor
    """int32 [M, ceil(V / 32)]; token t is allowed when bit t % 32 of word t // 32 is set"""


@dataclass(frozen=True)
class Edits:
    """Single places in the logits that change. Indices are flat, row * V + token."""

    banned: Tensor
    """int64 [B], set to -inf; a place may stand in it twice"""
    biased: Tensor
    """int64 [C], distinct"""
    bias: Tensor
    """float32 [C], added"""


@dataclass(frozen=True)
class SamplingTensors:
    """One row for each position to sample. A row with temperature 0 is greedy and ignores the filters and the key."""

    temperature: Tensor
    """float32 [R]"""
    top_k: Tensor
    """int32 [R]; 0 keeps all"""
    top_p: Tensor
    """float32 [R]; 1 keeps all"""
    min_p: Tensor
    """float32 [R]; 0 keeps all"""
    keys: Tensor
    """int64 [R], bits as unsigned: of (seed, choice, position, purpose); see `reference.exponential_noise`"""
    all_greedy: bool
    needs_filter: bool
    """some row has top_k, top_p or min_p set"""
    mask: Mask | None = None
    edits: Edits | None = None
    penalties: Penalties | None = None


class KVCache:
    """One layer's pages, in whatever layout its backend likes; only that backend looks inside.

    A page's keys are one contiguous row of `k`, with all that belongs to them (scales, say); its values one of `v`.
    """

    k_scale: Tensor | None = None
    """float32 [kv_heads], fixed; only in a format that has one for each head. `v_scale` is alike."""
    v_scale: Tensor | None = None

    def __init__(self, k: Tensor, v: Tensor, page_size: int) -> None:
        self.k, self.v, self.page_size = k, v, page_size

    def set_scales(self, keys: Tensor, values: Tensor) -> None:
        """float32 [kv_heads] each, before anything is written; a format without fixed scales stays as it is."""
        if self.k_scale is not None and self.v_scale is not None:
            self.k_scale.copy_(keys)
            self.v_scale.copy_(values)


class Device(ABC):
    """Memory, transfers and facts of one kind of device. One instance a rank."""

    name: str
    default_page_size: int
    page_multiple: int
    """a page holds a multiple of this many tokens"""
    dtypes: tuple[torch.dtype, ...]
    """dtypes it computes in, the preferred one first"""
    dist_backend: str
    kernels: str = "reference"
    """what its arithmetic runs on, for people to read: an instruction set, say"""
    asynchronous: bool = False
    """it works by itself while the host does something else, so that planning the next step meanwhile is for free"""
    torch_device: torch.device
    ops: Ops

    @abstractmethod
    def open(self, rank: int, threads: int | None) -> None:
        """Takes hold of the device for this rank. Raises DeviceUnavailable."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Bytes (total, free for us to take)."""

    @property
    def shares_host_memory(self) -> bool:
        return self.torch_device.type == "cpu"

    def synchronize(self) -> None:  # noqa: B027 - a device without queues has nothing to wait for
        """Waits until all queued work is done."""

    def upload(self, host: Tensor) -> Tensor:
        return host.to(self.torch_device)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def capture(self, fn: Any, batch: ForwardBatch) -> Any | None:
        """A replayable graph of `fn(batch)`, or None where the device has none."""
        return None

    def kv_bytes_per_page(
        self, spec: KVSpec, page_size: int, dtype: torch.dtype, quantized: KVFormat | None = None
    ) -> int:
        """Bytes of one layer's page."""
        if quantized is None:
            return spec.elements_per_token() * page_size * dtype.itemsize
        assert not isinstance(spec, LatentAttention), "no family with latent attention exists yet"
        return 2 * quantized.page_bytes(spec.num_kv_heads * page_size, spec.head_dim)

    @abstractmethod
    def allocate_kv(
        self, spec: KVSpec, num_pages: int, page_size: int, dtype: torch.dtype, quantized: KVFormat | None = None
    ) -> KVCache:
        """One layer's cache, for a model that computes in `dtype`; kept in it, or as `quantized` says.

        Memory that is never written should cost nothing where the system allows.
        """

    def block_bytes(self, cache: KVCache) -> int:
        """Bytes of one block (page) of this layer: what `read_block` fills."""
        return sum(len(row) for row in _rows(cache, 0))

    def copy_block(self, cache: KVCache, source: int, target: int) -> None:
        """Copies a block within the device, after what is queued so far."""
        cache.k[target].copy_(cache.k[source])
        cache.v[target].copy_(cache.v[source])

    def read_block(self, cache: KVCache, block: int, out: Tensor) -> None:
        """Copies a block's bytes to `out`, uint8 [block_bytes] on the host: keys, then values."""
        keys, values = _rows(cache, block)
        out[: len(keys)].copy_(keys)
        out[len(keys) :].copy_(values)

    def write_block(self, cache: KVCache, block: int, data: Tensor) -> None:
        """Copies `data`, as `read_block` filled it from any cache of the same kind, over a block."""
        keys, values = _rows(cache, block)
        keys.copy_(data[: len(keys)])
        values.copy_(data[len(keys) :])


def _rows(cache: KVCache, block: int) -> tuple[Tensor, Tensor]:
    """The bytes of a block's keys and of its values, as views."""
    return cache.k[block].view(-1).view(torch.uint8), cache.v[block].view(-1).view(torch.uint8)


def open_device(name: str, rank: int = 0, threads: int | None = None) -> Device:
    """The device of that name, opened. Raises UsageError for an unknown name, DeviceUnavailable for an absent one."""
    if name == "auto":
        name = "cpu"
    check_device(name)
    kind, _, profile = name.partition(":")
    module, attribute = DEVICES[kind].split(":")
    device: Device = getattr(import_module(module), attribute)(*([profile] if profile else []))
    device.open(rank, threads)
    return device


@contextmanager
def allocating(what: str, fix: str) -> Iterator[None]:
    """Turns a refusal of memory within into NotEnoughMemory: a limit may stand lower than `Device.memory` can see."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as err:
        refused = isinstance(err, MemoryError | torch.OutOfMemoryError) or getattr(err, "errno", None) == errno.ENOMEM
        if not refused and "DefaultCPUAllocator" not in str(err):  # torch has no class of its own for the host's memory
            raise
        said = str(err).partition("\n")[0][:200] or type(err).__name__
        raise NotEnoughMemory(f"the system refused memory for {what}: {said}", fix=fix) from None
