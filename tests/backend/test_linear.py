"""Packed linear layers: right, and the same for a row whatever stands beside it."""

from __future__ import annotations

import random

import pytest
import torch

from tests.backend.conftest import bf16, library
from tests.matrix import sample

SHAPES = [
    (rows, n, k)
    for rows in (1, 2, 5, 6, 7, 13, 24, 31, 97, 200)
    for n in (1, 15, 16, 17, 64, 65, 130, 257)
    for k in (1, 2, 7, 64, 577, 2049, 4097)
]


def exact(x, weight, bias):
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", sample(SHAPES, 24), ids=str)
def test_equals_double_precision(ops, shape, with_bias):
    rows, n, k = shape
    x, weight, bias = bf16(rows, k), bf16(n, k, scale=k**-0.5), bf16(n) if with_bias else None
    packed = ops.pack_linear(weight, bias)
    want = exact(x, weight, bias)
    torch.testing.assert_close(ops.linear(x, packed, torch.float32).double(), want, atol=2e-5, rtol=2e-5)
    rounded = ops.linear(x, packed)
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.double(), want, atol=1e-4, rtol=2**-8)


@pytest.mark.parametrize("k", [64, 577, 4097])
def test_row_is_the_same_alone_and_in_any_batch(ops, k):
    n = random.choice([48, 100, 333])
    packed = ops.pack_linear(bf16(n, k), bf16(n))
    x = bf16(130, k)
    alone = torch.cat([ops.linear(row, packed, torch.float32) for row in x.split(1)])
    for rows in sample(range(2, 71), 12):
        start = random.randrange(0, len(x) - rows)
        assert torch.equal(ops.linear(x[start : start + rows], packed, torch.float32), alone[start : start + rows]), (
            rows
        )
    assert torch.equal(ops.linear(x, packed, torch.float32), alone)


def test_threads_change_nothing(ops):
    packed = ops.pack_linear(bf16(500, 300), None)
    for rows in (1, 9, 150):
        x = bf16(rows, 300)
        results = []
        for threads in (1, 2, 3, 7):
            library().set_threads(threads)
            results.append(ops.linear(x, packed, torch.float32))
        assert all(torch.equal(r, results[0]) for r in results), rows


def test_takes_rows_of_a_wider_matrix(ops):
    wide = bf16(9, 200)
    packed = ops.pack_linear(bf16(40, 64), None)
    assert torch.equal(ops.linear(wide[:, 32:96], packed), ops.linear(wide[:, 32:96].contiguous(), packed))


def test_packs_a_transposed_weight(ops):
    weight, x = bf16(64, 40), bf16(3, 64)
    assert torch.equal(
        ops.linear(x, ops.pack_linear(weight.T, None)), ops.linear(x, ops.pack_linear(weight.T.contiguous(), None))
    )


def test_other_dtypes_go_to_the_reference(ops, reference):
    weight, x = torch.randn(8, 12), torch.randn(3, 12)
    assert torch.equal(ops.linear(x, ops.pack_linear(weight, None)), x @ weight.T)


def test_no_rows(ops):
    assert ops.linear(bf16(0, 64), ops.pack_linear(bf16(20, 64), None)).shape == (0, 20)
