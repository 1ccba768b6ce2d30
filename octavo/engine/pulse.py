"""Signs of life of an engine for clients that get no answer: is the process running, and when did its loop last turn?

A file of two times in the engine's directory, mapped into memory. A side thread of the engine writes the first, so it
goes on through a long step and stands still in a process that is stopped; only the loop itself writes the second, so a
thread that lives does not hide a loop that hangs. Both in seconds of the machine's monotonic clock, which all
processes share.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from pathlib import Path

BEAT_S = 0.25
_TIMES = struct.Struct("=dd")


class Pulse:
    """The engine's side."""

    def __init__(self, directory: str) -> None:
        file = os.open(_path(directory), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.ftruncate(file, _TIMES.size)
        self._times = memoryview(mmap.mmap(file, _TIMES.size)).cast("d")
        os.close(file)
        self._times[0] = self._times[1] = time.monotonic()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def turn(self) -> None:
        """To be called by the loop in each round."""
        self._times[1] = time.monotonic()

    def _beat(self) -> None:
        while True:
            self._times[0] = time.monotonic()
            time.sleep(BEAT_S)


def read_pulse(directory: str) -> tuple[float, float]:
    """Seconds since the process, and since its loop, last showed life. Raises OSError when there is no engine."""
    beat, turn = _TIMES.unpack(_path(directory).read_bytes())
    now = time.monotonic()
    return now - beat, now - turn


def _path(directory: str) -> Path:
    return Path(directory) / "pulse"
