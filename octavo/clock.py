"""What time it is. Whoever waits, or asks for the time to decide something, is handed a clock: tests need no sleep."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def time(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """Stands still but for `sleep`, which takes no time."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def time(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


SYSTEM_CLOCK = SystemClock()
