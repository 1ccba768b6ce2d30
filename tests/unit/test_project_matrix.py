"""`tests/matrix.py`: samples are fresh, repeatable by seed, and whole when asked."""

from __future__ import annotations

import random

import pytest

from tests import matrix


@pytest.mark.parametrize("seed", [random.randrange(1 << 32) for _ in range(3)])
def test_same_seed_same_sample_in_order(monkeypatch, seed):
    monkeypatch.setattr(matrix, "FULL", False)
    monkeypatch.setattr(matrix, "SEED", seed)
    cases = list(range(500))
    first = matrix.sample(cases, 20)
    assert first == matrix.sample(iter(cases), 20) == sorted(set(first)), seed
    monkeypatch.setattr(matrix, "SEED", seed + 1)
    assert matrix.sample(cases, 20) != first, seed


def test_full_and_small_matrices_are_whole(monkeypatch):
    monkeypatch.setattr(matrix, "FULL", True)
    assert matrix.sample(range(500), 20) == list(range(500))
    monkeypatch.setattr(matrix, "FULL", False)
    assert matrix.sample("abc", 3) == ["a", "b", "c"]
