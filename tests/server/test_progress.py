"""How much a start without a terminal logs."""

from __future__ import annotations

import logging
import random

import pytest

from octavo.server.progress import SECONDS_BETWEEN_LINES, LoadingLines
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/progress")


@pytest.mark.parametrize("seconds", [0.0, SECONDS_BETWEEN_LINES * 0.9, SECONDS_BETWEEN_LINES * RNG.uniform(3, 9)])
def test_lines_at_start_and_end_and_every_ten_seconds(caplog, seconds):
    now = 0.0
    lines = LoadingLines(lambda: now)
    total, updates = RNG.randint(10**6, 10**9), 500
    with caplog.at_level(logging.INFO):
        for stage in ("downloading", "loading weights"):
            begin = now
            for i in range(updates + 1):
                now = begin + seconds * i / updates
                lines.update(stage, total * i // updates, total)
            lines.update(stage, total, total)
    mine = [r.getMessage() for r in caplog.records if r.getMessage().startswith("loading weights")]
    note = f"{seconds} s, OCTAVO_SEED={SEED}: {mine}"
    assert abs(len(mine) - 2 - int(seconds / SECONDS_BETWEEN_LINES)) <= (seconds > SECONDS_BETWEEN_LINES), note
    assert "done in" in mine[-1], note
    assert len(caplog.records) == 2 * len(mine), note
    assert not any("MiB" in line for line in mine), note
