"""A KV cache of 8-bit codes in plain torch. Every backend's own conversion equals `encode` and `decode` bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.backends.base import KVCache
from octavo.backends.kv import FullAttention, KVFormat

_TYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SMALLEST = 2.0**-96
"""Vectors whose largest number is below are stored as zeros: 1 / scale would overflow."""

Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]


def encode(x: Tensor, form: KVFormat, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x [..., heads, head_dim] as codes (uint8, of the same shape) and, where `scale` [heads] is None, float32 scales
    [..., heads] found for each vector.

    A number is multiplied by 1 / scale, rounded to nearest even, and saturated. NaN and infinity are stored as NaN:
    by themselves with a fixed scale, else with all of their vector, whose scale is NaN then.
    """
    wide = x.float()
    if scale is None:
        highest = wide.abs().amax(-1)
        largest = torch.full_like(highest, form.largest)
        finite = highest.isfinite()
        scales = torch.where(finite, highest / largest, torch.nan)
        inverse = torch.where(finite & (highest >= SMALLEST), largest / highest, 0.0).unsqueeze(-1)
        scaled = torch.where(inverse == 0, 0.0, wide * inverse)
    else:
        scales = None
        scaled = torch.where(wide.isfinite(), wide * scale.reciprocal().unsqueeze(-1), torch.nan)
    if form.code == "int8":
        scaled = scaled.round()
    return scaled.clamp(-form.largest, form.largest).to(_TYPES[form.code]).view(torch.uint8), scales


def decode(codes: Tensor, form: KVFormat, scale: Tensor) -> Tensor:
    """float32 numbers of uint8 `codes` [..., heads, head_dim] with `scale` [heads] or [..., heads]."""
    return codes.view(_TYPES[form.code]).float() * scale.unsqueeze(-1)


class CodedPages:
    """Keys or values of a layer: views of `data`, uint8 [pages, bytes], and the fixed scales if there are."""

    def __init__(self, data: Tensor, spec: FullAttention, page_size: int, form: KVFormat) -> None:
        shape = (data.shape[0], page_size, spec.num_kv_heads)
        vectors = page_size * spec.num_kv_heads
        self.form, self.page_size = form, page_size
        self.codes = data[:, : vectors * spec.head_dim].view(*shape, spec.head_dim)
        self.fixed: Tensor | None = None
        if form.per_token_head:
            self.scales = data.view(torch.float32)[:, -vectors:].view(shape)
        else:
            self.scales = self.fixed = torch.ones(spec.num_kv_heads, device=data.device)

    def write(self, x: Tensor, slots: Tensor) -> None:
        """x [T, kv_heads, head_dim] into `slots` [T]."""
        page, offset = slots // self.page_size, slots % self.page_size
        codes, scales = encode(x, self.form, self.fixed)
        self.codes[page, offset] = codes
        if scales is not None:
            self.scales[page, offset] = scales

    def read(self, pages: Tensor) -> Tensor:
        """float32 [len(pages) * page_size, kv_heads, head_dim]"""
        scales = self.scales[pages] if self.fixed is None else self.fixed
        return decode(self.codes[pages], self.form, scales).flatten(0, 1)


class CodedKVCache(KVCache):
    """A page is a row of bytes: codes [page_size, kv_heads, head_dim], then scales [page_size, kv_heads] if each token
    has its own."""

    def __init__(self, spec: FullAttention, num_pages: int, page_size: int, form: KVFormat, zeros: Zeros) -> None:
        shape = (num_pages, form.page_bytes(page_size * spec.num_kv_heads, spec.head_dim))
        super().__init__(zeros(shape, torch.uint8), zeros(shape, torch.uint8), page_size)
        self.keys = CodedPages(self.k, spec, page_size, form)
        self.values = CodedPages(self.v, spec, page_size, form)
        self.k_scale, self.v_scale = self.keys.fixed, self.values.fixed
