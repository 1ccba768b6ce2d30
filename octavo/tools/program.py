"""How a program of ours begins and ends: with three open streams, and with no stack trace for Ctrl-C.

Imports next to nothing, so that it is in force before the imports that take time.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys

INTERRUPTED = 130


def begin() -> None:
    """Opens streams that the caller closed; until `raise_on_interrupt`, Ctrl-C ends the program at once.

    Without the first, the next file or socket would get the number of a stream, and whatever is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            assert opened == number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does with what a terminal's encoding lacks
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)  # an exception could come up anywhere, in the middle of an import too


def raise_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt: there is something to be tidied up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def complain(line: str) -> None:
    """One line on stderr, which may be full or closed at its other end."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def settle() -> None:
    """Gives up what cannot be written any more, so that the interpreter does not try again as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
