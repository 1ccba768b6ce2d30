"""The operations in bf16 on the C++ kernels. What is not bf16 goes to the reference.

The wrappers run hundreds of times a step: they check what would crash, pass pointers, and do nothing else.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.backends.base import AttentionMeta, KVCache, Penalties, SamplingTensors
from octavo.backends.cpu.lib import Kernels, KVCacheLayout
from octavo.backends.cpu.memory import Arena, lazy_zeros
from octavo.backends.kv import FullAttention, KVFormat
from octavo.backends.reference import Ops, PackedLinear

LANES = 16
"""Columns of a packed panel, tokens of a KV panel: what `csrc/cpu` calls kLanes."""
MAX_HEAD_DIM = 256
MOST_LEADERS = 256
"""the kernel keeps the best logprobs sorted as it finds them, which is slow for many"""
BF16 = torch.bfloat16


def _rounded_up(n: int) -> int:
    return -(-n // LANES) * LANES


@dataclass(frozen=True)
class PanelLinear(PackedLinear):
    """bf16 panels [N / 16][K / 2][16][2], padded with zeros (`linear.cpp`)."""

    weight_ptr: int
    bias_ptr: int | None


class PanelKVCache(KVCache):
    """Keys and values in panels of 16 tokens (`kv_cache.h`), in bf16 or as 8-bit codes."""

    def __init__(self, spec: FullAttention, num_pages: int, page_size: int, quantized: KVFormat | None = None) -> None:
        assert page_size % LANES == 0, page_size
        self.kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim
        dtype = BF16 if quantized is None else torch.uint8
        keys, values = (size // dtype.itemsize for size in panel_bytes(spec, page_size, quantized))
        super().__init__(lazy_zeros((num_pages, keys), dtype), lazy_zeros((num_pages, values), dtype), page_size)
        if quantized is not None and not quantized.per_token_head:
            self.k_scale, self.v_scale = torch.ones(self.kv_heads), torch.ones(self.kv_heads)
        self._layout = KVCacheLayout(
            self.k.data_ptr(), self.v.data_ptr(), None if self.k_scale is None else self.k_scale.data_ptr(),
            None if self.v_scale is None else self.v_scale.data_ptr(), self.kv_heads, self.head_dim, page_size,
            _FORMATS["bf16" if quantized is None else quantized.code],
        )  # fmt: skip
        self.layout_ptr = ctypes.addressof(self._layout)


_FORMATS = {"bf16": 0, "int8": 1, "fp8_e4m3": 2, "fp8_e5m2": 3}


def panel_bytes(spec: FullAttention, page_size: int, quantized: KVFormat | None) -> tuple[int, int]:
    """Of one page: (keys, values)."""
    vectors, widths = spec.num_kv_heads * page_size, (spec.head_dim, _rounded_up(spec.head_dim))
    keys, values = (vectors * w * 2 if quantized is None else quantized.page_bytes(vectors, w) for w in widths)
    return keys, values


def supports_head(head_dim: int) -> bool:
    return head_dim % 8 == 0 and 0 < head_dim <= MAX_HEAD_DIM


class CpuOps(Ops):
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._arena = Arena()
        self._gated = {"silu": kernels.gated_silu, "gelu_tanh": kernels.gated_gelu_tanh}

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        if table.dtype is not BF16:
            return super().embed(table, token_ids)
        (vocab, width), rows = table.shape, token_ids.shape[0]
        assert table.is_contiguous() and token_ids.dtype is torch.int64 and token_ids.is_contiguous()
        out = torch.empty((rows, width), dtype=BF16)
        failed = self._kernels.embed(table.data_ptr(), vocab, token_ids.data_ptr(), out.data_ptr(), rows, width)
        assert not failed, f"a token id is outside the vocabulary of {vocab}"
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype is not BF16 or weight.dtype is not BF16 or x.dim() != 2:
            return super().rms_norm(x, weight, eps)
        rows, width = x.shape
        assert x.stride(1) == 1 and weight.shape == (width,)
        out = torch.empty((rows, width), dtype=BF16)
        self._kernels.rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), rows, width, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype is not BF16 or weight.dtype is not BF16:
            return super().add_rms_norm(x, residual, weight, eps)
        rows, width = x.shape
        assert x.shape == residual.shape and residual.dtype is BF16 and weight.shape == (width,)
        assert x.is_contiguous() and residual.is_contiguous()
        out = torch.empty((rows, width), dtype=BF16)
        self._kernels.add_rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps
        )
        return out, residual

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        if x.dtype is not BF16:
            return super().rope(x, positions, table)
        tokens, heads, head_dim = x.shape
        assert x.stride(2) == 1 and x.stride(1) == head_dim and positions.shape == (tokens,)
        assert table.dtype is torch.float32 and table.is_contiguous() and table.shape[1] <= head_dim
        assert positions.dtype is torch.int64 and positions.is_contiguous()
        self._kernels.rope(
            x.data_ptr(), x.stride(0), positions.data_ptr(), table.data_ptr(), tokens, heads, head_dim, table.shape[1]
        )
        return x

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        kernel = self._gated.get(activation)
        if gate_up.dtype is not BF16 or kernel is None:
            return super().gated_act(gate_up, activation)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.stride(1) == 1
        out = torch.empty((rows, width), dtype=BF16)
        kernel(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, width)
        return out

    def pack_linear(self, weight: Tensor, bias: Tensor | None, lasting: bool = True) -> PackedLinear:
        if weight.dtype is not BF16 or (bias is not None and bias.dtype is not BF16):
            return super().pack_linear(weight, bias, lasting)
        (n, k), bias = weight.shape, None if bias is None else bias.contiguous()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        count = _rounded_up(n) * (k + k % 2)
        packed = self._arena.empty(count, BF16) if lasting else torch.empty(count, dtype=BF16)
        self._kernels.pack_linear(weight.data_ptr(), weight.stride(0), n, k, packed.data_ptr())
        return PanelLinear(k, n, (packed,), bias, packed.data_ptr(), None if bias is None else bias.data_ptr())

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        if not isinstance(packed, PanelLinear):
            return super().linear(x, packed, out_dtype)
        (rows, k), n = x.shape, packed.out_features
        assert x.dtype is BF16 and x.stride(1) == 1 and k == packed.in_features
        out = torch.empty((rows, n), dtype=out_dtype or BF16)
        assert out.dtype is BF16 or out.dtype is torch.float32, out_dtype
        self._kernels.linear(
            x.data_ptr(), x.stride(0), rows, packed.weight_ptr, packed.bias_ptr, n, k, out.data_ptr(), n,
            out.dtype is torch.float32,
        )  # fmt: skip
        return out

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, meta: AttentionMeta) -> None:
        if not isinstance(cache, PanelKVCache):
            super().write_kv(k, v, cache, meta)
            return
        tokens, kv_heads, head_dim = k.shape
        assert k.dtype is BF16 and v.dtype is BF16 and v.shape == k.shape
        assert (kv_heads, head_dim) == (cache.kv_heads, cache.head_dim)
        assert k.stride()[1:] == (head_dim, 1) and v.stride()[1:] == (head_dim, 1)
        assert meta.slots.dtype is torch.int64 and meta.slots.shape == (tokens,) and meta.slots.is_contiguous()
        self._kernels.write_kv(
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), cache.layout_ptr, meta.slots.data_ptr(), tokens
        )  # fmt: skip

    def attention(self, q: Tensor, cache: KVCache, meta: AttentionMeta, scale: float, window: int | None) -> Tensor:
        if not isinstance(cache, PanelKVCache):
            return super().attention(q, cache, meta, scale, window)
        tokens, heads, head_dim = q.shape
        assert q.dtype is BF16 and head_dim == cache.head_dim and heads % cache.kv_heads == 0
        assert q.stride()[1:] == (head_dim, 1) and (window is None or window > 0)
        start, lens, table = meta.query_start, meta.seq_lens, meta.block_table
        assert start.dtype is torch.int32 and lens.dtype is torch.int32 and table.dtype is torch.int32
        assert start.is_contiguous() and lens.is_contiguous() and table.stride(1) == 1
        assert start.shape[0] == lens.shape[0] + 1 and meta.page_size == cache.page_size
        out = torch.empty((tokens, heads, head_dim), dtype=BF16)
        self._kernels.attention(
            q.data_ptr(), q.stride(0), out.data_ptr(), heads * head_dim, cache.layout_ptr, start.data_ptr(),
            lens.data_ptr(), table.data_ptr(), table.stride(0), lens.shape[0], heads, scale, window or 0,
        )  # fmt: skip
        return out

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        logits = self.edit_logits(logits, params)
        (rows, vocab), temperature = logits.shape, params.temperature
        assert logits.dtype is torch.float32 and logits.stride(1) == 1
        assert temperature.dtype is torch.float32 and temperature.is_contiguous()
        if params.needs_filter:
            temperature = self._filter(logits, params)
        assert params.keys.dtype is torch.int64 and params.keys.is_contiguous()
        tokens = torch.empty(rows, dtype=torch.int64)
        self._kernels.sample(
            logits.data_ptr(), logits.stride(0), rows, vocab, temperature.data_ptr(), params.keys.data_ptr(),
            tokens.data_ptr(),
        )  # fmt: skip
        return tokens

    def apply_penalties(self, logits: Tensor, p: Penalties) -> None:
        assert logits.dtype is torch.float32 and logits.stride(1) == 1
        assert p.tokens.dtype is torch.int32 and p.counts.dtype is torch.float32
        assert p.rows.dtype is p.starts.dtype is p.lengths.dtype is torch.int64
        assert p.repetition.is_contiguous() and p.frequency.is_contiguous() and p.presence.is_contiguous()
        self._kernels.penalize(
            logits.data_ptr(), logits.stride(0), len(p.rows), p.rows.data_ptr(), p.starts.data_ptr(),
            p.lengths.data_ptr(), p.repetition.data_ptr(), p.frequency.data_ptr(), p.presence.data_ptr(),
            p.tokens.data_ptr(), p.counts.data_ptr(),
        )  # fmt: skip

    def apply_bitmask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        vocab = logits.shape[1]
        assert logits.dtype is torch.float32 and logits.stride(1) == 1
        assert rows.dtype is torch.int64 and rows.is_contiguous()
        assert bits.dtype is torch.int32 and bits.is_contiguous() and bits.shape == (len(rows), -(-vocab // 32))
        self._kernels.mask(
            logits.data_ptr(), logits.stride(0), len(rows), vocab, rows.data_ptr(), bits.data_ptr()
        )  # fmt: skip

    def log_softmax(self, logits: Tensor) -> Tensor:
        vocab = logits.shape[1]
        _, _, values, ids = self._logprobs(logits, torch.zeros(len(logits), dtype=torch.int64), vocab)
        return torch.empty_like(values).scatter_(1, ids, values)

    def _filter(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """Scales and filters rows of `logits` in place; gives the temperatures, which are 1 for those rows."""
        top_k, top_p, min_p, temperature = params.top_k, params.top_p, params.min_p, params.temperature.clone()
        assert top_k.dtype is torch.int32 and top_p.dtype is torch.float32 and min_p.dtype is torch.float32
        assert top_k.is_contiguous() and top_p.is_contiguous() and min_p.is_contiguous()
        rows, vocab = logits.shape
        self._kernels.filter(
            logits.data_ptr(), logits.stride(0), rows, vocab, temperature.data_ptr(), top_k.data_ptr(),
            top_p.data_ptr(), min_p.data_ptr(),
        )  # fmt: skip
        return temperature

    def logprobs(self, logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if logits.dtype is not torch.float32:
            return super().logprobs(logits, token_ids, top)
        if top <= MOST_LEADERS:
            return self._logprobs(logits, token_ids, top)
        chosen, ranks, _, _ = self._logprobs(logits, token_ids, 0)
        order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        return chosen, ranks, self.log_softmax(logits).gather(1, order), order

    def _logprobs(self, logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `logprobs`; if `top` is the whole vocabulary, all tokens in no certain order."""
        rows, vocab = logits.shape
        assert logits.stride(1) == 1 and token_ids.dtype is torch.int64 and token_ids.is_contiguous()
        assert top <= vocab and token_ids.shape == (rows,)
        chosen, ranks = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        values, ids = torch.empty((rows, top)), torch.empty((rows, top), dtype=torch.int64)
        self._kernels.logprobs(
            logits.data_ptr(), logits.stride(0), rows, vocab, token_ids.data_ptr(), chosen.data_ptr(),
            ranks.data_ptr(), top, values.data_ptr(), ids.data_ptr(),
        )  # fmt: skip
        return chosen, ranks, values, ids
