"""Grammars from strangers are compiled first in a process of its own, which ends when one takes too long or too much.

`python -m octavo.text.grammar_check` is that process. It reads frames (8 bytes of length, then JSON) from its standard
input and answers each with one; it ends with its parent, whose end of the pipe then closes.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

import msgspec

TIMEOUT_S = 3.0
"""for one grammar; on a slow or busy machine large ones, of some hundred thousand bytes, may need it"""
START_TIMEOUT_S = 30.0
MAX_MEMORY_BYTES = 1 << 30


class TooMuch(Exception):
    """The process had to be ended, or ended by itself."""


class GrammarCheck:
    """Belongs to one API process; starts its own process on first use. Safe to use from several threads."""

    def __init__(self, special: Mapping[int, str], vocab_size: int) -> None:
        self._settings = msgspec.json.encode({"special": {str(k): v for k, v in special.items()}, "size": vocab_size})
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, grammar: str, gbnf: bool) -> dict[str, Any]:
        """{"error": str} or, for a grammar that can be followed, {"grammar": str} in llguidance's form.

        Raises TooMuch for one that takes more than `TIMEOUT_S` or `MAX_MEMORY_BYTES`.
        """
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                return self._exchange(msgspec.json.encode({"grammar": grammar, "gbnf": gbnf}), TIMEOUT_S)
            except (TooMuch, OSError, msgspec.DecodeError) as err:
                self._end()
                raise TooMuch from err

    def close(self) -> None:
        """Ends the process, also in the middle of a grammar."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> None:
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        self._process = subprocess.Popen(
            (sys.executable, "-m", __name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True,
        )  # fmt: skip
        self._exchange(self._settings, START_TIMEOUT_S)

    def _exchange(self, content: bytes, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        _write(self._process.stdin, content)
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise TooMuch
        answer = _read(self._process.stdout)
        if answer is None:
            raise TooMuch
        found: dict[str, Any] = msgspec.json.decode(answer)
        return found

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(OSError):
                self._process.communicate()
            self._process = None


def _write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(len(content).to_bytes(8, "little") + content)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    header = pipe.read(8)
    return pipe.read(int.from_bytes(header, "little")) if len(header) == 8 else None


def main() -> None:
    from octavo.text.grammar import byte_words, fault_of, to_lark

    pipe_in, pipe_out = sys.stdin.buffer, sys.stdout.buffer
    settings = msgspec.json.decode(_read(pipe_in) or b"{}")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    words = byte_words({int(id): text for id, text in settings["special"].items()}, settings["size"])
    _write(pipe_out, b"{}")
    while (frame := _read(pipe_in)) is not None:
        asked = msgspec.json.decode(frame)
        signal.alarm(int(4 * TIMEOUT_S))  # also ends a process whose parent is gone
        try:
            grammar = to_lark(asked["grammar"]) if asked["gbnf"] else asked["grammar"]
            fault = fault_of(grammar, words)
            answer = {"grammar": grammar} if fault is None else {"error": fault}
        except (ValueError, RecursionError) as err:
            answer = {"error": str(err)}
        _write(pipe_out, msgspec.json.encode(answer))
        signal.alarm(0)


if __name__ == "__main__":
    main()
