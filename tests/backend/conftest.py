"""The kernels of each instruction set of this machine, a reference to compare with, and fresh random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from octavo.backends.cpu import lib
from octavo.backends.cpu.ops import CpuOps
from octavo.backends.reference import Ops
from tests.matrix import SEED


def library() -> lib.Library:
    """A missing library fails the tests, rather than hiding what they cover."""
    loaded = lib.load()
    assert loaded is not None, "build the kernels first: pip install ., or cmake -S csrc/cpu -B build"
    return loaded


ISAS = library().isas()


@pytest.fixture(params=ISAS)
def isa(request) -> str:
    return request.param


@pytest.fixture
def ops(isa) -> CpuOps:
    return CpuOps(library().kernels(isa))


@pytest.fixture
def reference() -> Ops:
    return Ops()


@pytest.fixture(autouse=True)
def _fresh_numbers(request) -> None:
    """Each test has its own numbers, drawn from the run's seed, which stands in the header."""
    seed = random.Random(f"{SEED}/{request.node.nodeid}").getrandbits(32)
    torch.manual_seed(seed)
    random.seed(seed)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    library().set_threads(2)
    yield
    library().set_threads(1)


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).bfloat16()
