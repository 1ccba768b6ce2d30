"""From the bytes of a checkpoint's tensor to floats: plain types, and GGUF's block formats dequantized."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from octavo.backends.cpu import lib
from octavo.errors import BadModelFile
from octavo.formats.gguf import BLOCK_TYPES
from octavo.formats.mapped import PLAIN_TYPES

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_ELEMENTS = 1 << 22
"""converted at a time, so that the intermediate floats stay small; a multiple of every block"""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def read_into(out: Tensor, data: Bytes, kind: str) -> None:
    """Writes the values of `data`, of type `kind`, over the contiguous `out`, rounded to its dtype.

    Raises BadModelFile for a type that is not supported.
    """
    assert out.is_contiguous(), out.stride()
    flat, source = out.view(-1), data.reshape(-1)
    if kind in _PLAIN:
        block, block_bytes = 1, _PLAIN[kind].itemsize
    elif kind in BLOCK_TYPES:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    else:
        supported = ", ".join(PLAIN_TYPES + BLOCK_TYPES)
        raise BadModelFile(f"weights of type {kind}", limit=supported, fix="use another quantization of this model")
    assert source.size == flat.numel() // block * block_bytes, (source.size, out.shape, kind)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        target = flat[start : start + _CHUNK_ELEMENTS]
        first = start // block * block_bytes
        chunk = source[first : first + target.numel() // block * block_bytes]
        _convert(target, chunk, kind)


def _convert(out: Tensor, data: Bytes, kind: str) -> None:
    if kind in _PLAIN:
        if out.dtype == _PLAIN[kind]:
            out.view(torch.uint8).numpy()[:] = data
        else:
            out.copy_(torch.from_numpy(data.copy()).view(_PLAIN[kind]))
        return
    if out.dtype in (torch.float32, torch.bfloat16) and lib.available():
        lib.dequantize(GGMLQuantizationType[kind], data, out)
        return
    values = dequantize(data.reshape(1, -1), GGMLQuantizationType[kind])
    out.copy_(torch.from_numpy(values.reshape(-1)))
