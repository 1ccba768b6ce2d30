"""Norms, rotary embedding, gated activations and embeddings against the reference."""

from __future__ import annotations

import random

import pytest
import torch

from tests.backend.conftest import bf16
from tests.matrix import sample

ROWS = [1, 2, 3, 17, 200]
WIDTHS = [8, 16, 24, 31, 576, 1537]
SHAPES = [(r, w) for r in ROWS for w in WIDTHS]
ONE_STEP = 2**-7
"""neighbours in bf16 are at most this far apart, relatively"""


def close(got, want):
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), want.float(), atol=1e-5, rtol=ONE_STEP)


@pytest.mark.parametrize("shape", sample(SHAPES, 10), ids=str)
def test_rms_norm(ops, reference, shape):
    x, weight = bf16(*shape, scale=random.choice([0.01, 1, 100])), bf16(shape[1])
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("shape", sample(SHAPES, 10), ids=str)
def test_add_rms_norm(ops, reference, shape):
    x, residual, weight = bf16(*shape), bf16(*shape), bf16(shape[1])
    want, want_total = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    got, got_total = ops.add_rms_norm(x, residual, weight, 1e-6)
    close(got, want)
    assert torch.equal(got_total, want_total)


def test_a_row_is_the_same_alone(ops):
    x, weight = bf16(70, 577), bf16(577)
    alone = torch.cat([ops.rms_norm(row, weight, 1e-5) for row in x.split(1)])
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), alone)


@pytest.mark.parametrize("case", sample([(d, r) for d in (8, 64, 80, 96, 128) for r in (d // 2, d)], 6), ids=str)
def test_rope(ops, reference, case):
    dim, rotary = case
    table = torch.randn(50, rotary)
    fused = bf16(11, 7, dim)
    positions = torch.randint(0, 50, (11,))
    x = fused[:, :5]
    want = reference.rope(x.clone(), positions, table)
    untouched = fused[:, 5:].clone()
    torch.testing.assert_close(ops.rope(x, positions, table).float(), want.float(), atol=1e-6, rtol=ONE_STEP)
    assert torch.equal(fused[:, 5:], untouched)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", sample(SHAPES, 6), ids=str)
def test_gated_act(ops, reference, shape, activation):
    gate_up = bf16(shape[0], 2 * shape[1], scale=3)
    want = reference.gated_act(gate_up.float(), activation)
    got = ops.gated_act(gate_up, activation)
    torch.testing.assert_close(got.float(), want, atol=1e-5, rtol=ONE_STEP)


def test_gated_act_at_the_ends(ops):
    gate = torch.tensor([[-200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30, -1e30]])
    got = ops.gated_act(torch.cat((gate, torch.ones_like(gate)), dim=1).bfloat16(), "silu")
    want = torch.nn.functional.silu(gate.bfloat16().float())
    torch.testing.assert_close(got.float(), want, atol=1e-30, rtol=ONE_STEP)


def test_embed(ops, reference):
    table, ids = bf16(100, 72), torch.randint(0, 100, (33,))
    assert torch.equal(ops.embed(table, ids), reference.embed(table, ids))
    for wrong in (-1, 100):
        with pytest.raises(AssertionError, match="outside the vocabulary"):
            ops.embed(table, torch.tensor([wrong]))


def test_float32_goes_to_the_reference(ops, reference):
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(ops.gated_act(x, "silu"), reference.gated_act(x, "silu"))
    got, total = ops.add_rms_norm(x, x, weight, 1e-5)
    assert total.dtype is torch.float32 and torch.equal(got, reference.rms_norm(x + x, weight, 1e-5))
