"""Blocks of the KV cache as bytes: copied within a device, and out of and into it, in every layout."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.backends.base import open_device
from octavo.backends.kv import KV_FORMATS, FullAttention

BLOCKS, PAGE = 6, 32


@pytest.mark.parametrize("dim", [64, 72, 20])
@pytest.mark.parametrize(
    "form", [None, *dict.fromkeys(KV_FORMATS.values())], ids=lambda form: getattr(form, "name", "")
)
@pytest.mark.parametrize(("name", "dtype"), [("cpu", torch.bfloat16), ("cpu", torch.float32),
                                             ("reference", torch.float32), ("reference", torch.float16)])  # fmt: skip
def test_blocks_travel_whole_and_leave_others_alone(name, dtype, form, dim):
    device = open_device(name, threads=1)
    spec = FullAttention(random.randint(1, 4), dim)
    cache, other = (device.allocate_kv(spec, BLOCKS, PAGE, dtype, form) for _ in range(2))
    size = device.block_bytes(cache)
    assert size == device.kv_bytes_per_page(spec, PAGE, dtype, form)
    contents = torch.randint(0, 256, (BLOCKS, size), dtype=torch.uint8)  # NaNs among them

    def block(source, index):
        out = torch.empty(size, dtype=torch.uint8)
        device.read_block(source, index, out)
        return out

    for index in range(BLOCKS):
        device.write_block(cache, index, contents[index])
    source, target = random.sample(range(BLOCKS), 2)
    device.copy_block(cache, source, target)
    contents[target] = contents[source]
    device.write_block(other, 1, block(cache, source))
    assert all(torch.equal(block(cache, i), contents[i]) for i in range(BLOCKS)), (source, target)
    assert torch.equal(other.k[1].view(torch.uint8), cache.k[source].view(torch.uint8))
    assert not other.k[0].view(torch.uint8).any() and not other.v[2].view(torch.uint8).any()
