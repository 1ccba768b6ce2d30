"""Times several things in turns, so that a busy moment of the machine hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Name = TypeVar("Name")


def interleave(
    runs: Mapping[Name, Callable[[], object]], rounds: int, min_seconds: float = 0.0
) -> dict[Name, list[float]]:
    """Seconds of each call, after one to warm up; a round calls each at least once and for at least `min_seconds`."""
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            started, spent = time.perf_counter(), 0.0
            while not spent or spent < min_seconds:
                before = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - before)
                spent = time.perf_counter() - started
    return times
