from __future__ import annotations

import random

import pytest

from tests.engine import tiny
from tests.matrix import SEED


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return tiny.write_llama(tmp_path_factory.mktemp("llama"), SEED)


@pytest.fixture(scope="session")
def mistral(tmp_path_factory):
    return tiny.write_mistral(tmp_path_factory.mktemp("mistral"), SEED, window=9)


@pytest.fixture
def rng(request):
    """Fresh numbers for each test; the seed stands in pytest's header."""
    return random.Random(f"{SEED}/{request.node.name}")
