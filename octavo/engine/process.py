"""Fresh programs that end with their parent. No torch, and never fork or multiprocessing.

A child reads frames (8 bytes of length, then content) from its standard input: first its settings as JSON, then
whatever its parent has to say. End-of-file there means that the parent is gone. What a child prints goes, line by
line, to the parent's standard error; the last line is kept to explain a death.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PREFIX = "octavo-"
MAX_SOCKET_PATH = 80
"""bytes of a directory's path that leave room for a socket's name: the kernel allows 107 in all"""
_LOCK_NAME = re.compile(r"[0-9a-f]{32}\.lock")


def make_directory() -> str:
    """A new directory that only this user can enter, short enough to hold Unix sockets."""
    return tempfile.mkdtemp(prefix=PREFIX, dir=_parent())


def _parent() -> str:
    parent = tempfile.gettempdir()
    return parent if len(os.fsencode(parent)) < MAX_SOCKET_PATH else "/tmp"


def sweep_directories() -> None:
    """Removes directories of ours whose engine and clients were all killed at once, so that none could do it.

    Such a one holds exactly what engines and clients make, by name and kind, and locks, of which nobody holds one. One
    without a lock may be another program's, or so new that its lock is still to come.
    """
    for path in Path(_parent()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            facts = path.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
                continue
            files = list(path.iterdir())
            locks = [file for file in files if _LOCK_NAME.fullmatch(file.name)]
            if locks and all(map(_is_ours, files)) and not any(map(is_locked, locks)):
                for file in files:
                    file.unlink()
                path.rmdir()


def _is_ours(file: Path) -> bool:
    """Whether a file in an engine's directory is what an engine or a client puts there."""
    facts = file.lstat()
    regular = stat.S_ISREG(facts.st_mode)
    if _LOCK_NAME.fullmatch(file.name):
        return regular and facts.st_size == 0
    if file.name == "engine.sock":
        return stat.S_ISSOCK(facts.st_mode)
    return regular and file.name in ("pulse", "rendezvous")


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock; no for a file that is not there, yes when that cannot be found out."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def remove_directory(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


class Child:
    """A running program. `on_exit(status, last_line)` is called once, in a thread of ours, when it has ended."""

    def __init__(
        self, program: Sequence[str], settings: dict[str, Any], directory: str, on_exit: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        # The child must import what we import, whatever directory the user stands in: our module path, not its own.
        # For the same reason it starts in a directory of ours, so `settings` must hold no relative path.
        paths = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=directory,
            env={**os.environ, "PYTHONPATH": paths}, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self._on_exit = on_exit
        self._last_line = ""
        self.send(json.dumps(settings).encode())
        threading.Thread(target=self._wait, name=f"wait-{self.pid}", daemon=True).start()

    def send(self, content: bytes) -> None:
        """Writes one frame; a child that is gone is noticed by `on_exit`, not here."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(len(content).to_bytes(8, "little") + content)
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends its standard input, and so the child."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> None:
        """Returns when it has ended; after `timeout_s` it is killed."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def _wait(self) -> None:
        reader = threading.Thread(target=self._forward, name=f"read-{self.pid}", daemon=True)
        reader.start()
        code = self._process.wait()
        reader.join(timeout=2)  # a grandchild may hold the pipe open for longer
        self._on_exit(_status(code), self._last_line)

    def _forward(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for raw in lines:
                line = raw.decode(errors="replace")
                self._last_line = line.strip() or self._last_line
                with suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(line)
                    sys.stderr.flush()


def _status(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


# -- in the child ------------------------------------------------------------------------------------------------------


def read_frame() -> bytes | None:
    """The next frame from the parent; None when the parent is gone."""
    header = _read(8)
    return None if header is None else _read(int.from_bytes(header, "little"))


def _read(count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_settings() -> dict[str, Any]:
    frame = read_frame()
    if frame is None:
        raise SystemExit("this program is started by Octavo itself; use `octavo serve`")
    settings: dict[str, Any] = json.loads(frame)
    return settings


def end_with_parent(cleanup: Callable[[], None]) -> None:
    """From now on the end of the parent ends this process at once, whatever it is doing, after `cleanup`."""

    def watch() -> None:
        while read_frame() is not None:
            pass
        cleanup()
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


class _PrefixedLines(logging.Formatter):
    def __init__(self, prefix: str) -> None:
        super().__init__("%(levelname)s %(message)s")
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(self._prefix + line for line in super().format(record).splitlines())


def log_to_stderr(prefix: str) -> None:
    """Each line of the log begins with `prefix`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrefixedLines(prefix))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)


def lock_path(directory: str, client_id: str) -> Path:
    """The file that a client holds locked for as long as it lives."""
    return Path(directory) / f"{client_id}.lock"


def socket_address(directory: str) -> str:
    return f"ipc://{directory}/engine.sock"
