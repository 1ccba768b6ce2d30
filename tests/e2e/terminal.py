"""A program in a terminal of its own: what it writes can be waited for, and keys can be sent."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType

IN_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)  # the first terminal that a session leader opens becomes its own
for number in (0, 1, 2):
    os.dup2(terminal, number)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Terminal:
    """Ends the program, if it still runs, when the `with` block is left."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.keys, self._screen = os.openpty()  # the second end stays open: without one, reading the first would fail
        wrapped = [sys.executable, "-c", IN_TERMINAL, os.ttyname(self._screen), *command]
        self.process = subprocess.Popen(wrapped, env=environment, start_new_session=True)
        self.shown = ""
        self.read = 0

    def expect(self, text: str, timeout_s: float = 60.0) -> str:
        """What came since the last expected text, up to and with this one."""
        end = time.monotonic() + timeout_s
        while (found := self.shown.find(text, self.read)) < 0:
            if time.monotonic() > end or not self._more():
                raise AssertionError(f"{text!r} did not come; the terminal shows:\n{self.shown}")
        passed, self.read = self.shown[self.read : found + len(text)], found + len(text)
        return passed

    def send(self, keys: str) -> None:
        os.write(self.keys, keys.encode())

    def interrupt(self, text: str) -> str:
        """Ctrl-C, until `text` comes. Again after a while, because Python misses one between two reads of a key."""
        for _ in range(20):
            self.send("\x03")
            with suppress(AssertionError):
                return self.expect(text, 1.0)
        raise AssertionError(f"{text!r} did not come after Ctrl-C; the terminal shows:\n{self.shown}")

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code; reads on meanwhile, so that the program can finish writing."""
        end = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < end:
            self._more()
        return self.process.wait(1)

    def _more(self) -> bool:
        """False when the program is gone and all has been read."""
        running = self.process.poll() is None
        if select.select([self.keys], [], [], 0.2)[0]:
            self.shown += os.read(self.keys, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
            return True
        return running

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.keys)
        os.close(self._screen)
