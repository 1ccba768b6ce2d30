"""GGUF blocks: float32 results equal gguf-py's bit for bit."""

from __future__ import annotations

import random

import gguf
import numpy as np
import pytest
import torch

from octavo.backends.cpu import lib
from tests.backend.conftest import library
from tests.matrix import SEED

TYPES = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def random_blocks(kind, blocks):
    """(random bytes of that many blocks, their values by gguf-py), of blocks whose values are all finite."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(random.getrandbits(32))
    data = generator.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(data, kind).reshape(blocks, -1)
    finite = np.isfinite(values).all(axis=1)
    return data[finite].reshape(-1), values[finite].reshape(-1)


@pytest.mark.parametrize("kind", TYPES)
def test_equals_gguf(isa, kind, monkeypatch):
    monkeypatch.setattr(lib, "kernels", lambda: library().kernels(isa))
    kind = gguf.GGMLQuantizationType[kind]
    data, want = random_blocks(kind, 3000)
    got = torch.empty(len(want))
    lib.dequantize(kind, data, got)
    assert np.array_equal(got.numpy().view(np.uint32), want.view(np.uint32)), SEED
    rounded = torch.empty(len(want), dtype=torch.bfloat16)
    lib.dequantize(kind, data, rounded)
    assert torch.equal(rounded, torch.from_numpy(want).bfloat16()), SEED


@pytest.mark.parametrize(("kind", "size", "count"), [(2, 18, 31), (2, 17, 32), (99, 18, 32)])
def test_refuses_what_does_not_fit(kind, size, count):
    with pytest.raises(AssertionError, match=f"{size} bytes of ggml type {kind}"):
        lib.dequantize(kind, np.zeros(size, dtype=np.uint8), torch.empty(count))
