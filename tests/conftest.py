"""What every test shares: the seed in the header, few threads, and the default model."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.matrix import FULL, SEED

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does, so that no server outlives it


def pytest_report_header() -> str:
    return f"octavo: OCTAVO_SEED={SEED}, matrices {'whole (OCTAVO_FULL=1)' if FULL else 'sampled'}"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, fetched on first use as a user's `octavo serve smollm2` would."""
    from octavo.hub.resolve import resolve_model

    return Path(resolve_model("smollm2", None, None))
