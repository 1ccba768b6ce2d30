"""`OCTAVO_BATCH_INVARIANT=1`: on plain torch, too, a request's bits do not depend on its company."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.backends.reference import Ops, PackedLinear
from octavo.backends.row_by_row import RowByRowOps
from tests.engine.tiny import LocalEngine, request, write_llama, write_mistral
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/rows")


def test_products_are_those_of_the_reference():
    torch.manual_seed(SEED)
    x, weight, bias = torch.randn(7, 48), torch.randn(20, 48), torch.randn(20)
    packed = PackedLinear(48, 20, (weight,), bias)
    torch.testing.assert_close(RowByRowOps().linear(x, packed), Ops().linear(x, packed))
    assert RowByRowOps().linear(x[:0], packed).shape == (0, 20)


@pytest.mark.parametrize("window", [None, 9])
def test_company_changes_no_bit(window, tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_BATCH_INVARIANT", "1")
    folder = write_llama(tmp_path, SEED) if window is None else write_mistral(tmp_path, SEED, window)
    asked = [
        request(str(i), [RNG.randrange(3, 160) for _ in range(RNG.randint(1, 40))], count=RNG.randint(2, 12),
                temperature=RNG.choice((0.0, 0.9)), seed=i, logprobs=3, repetition_penalty=RNG.choice((1.0, 1.3)))
        for i in range(8)
    ]  # fmt: skip
    bits = {}
    for shape in ({}, {"budget": 7}, {"blocks": 25, "budget": 30}):
        engine = LocalEngine(folder, **shape)
        assert isinstance(engine.runner._device.ops, RowByRowOps)
        bits[str(shape)] = {name: [(e.token_ids, e.logprobs) for e in events]
                            for name, (events,) in engine.run(*asked).items()}  # fmt: skip
    alone = {}
    for one in asked:
        (events,) = LocalEngine(folder).run(one)[one.request_id]
        alone[one.request_id] = [(e.token_ids, e.logprobs) for e in events]
    assert all(found == alone for found in bits.values()), f"OCTAVO_SEED={SEED}"
