"""Messages typed before, for the arrow keys; kept between runs where the home directory can be written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LIMIT = 1000


class History:
    """One message a line in the file, its own line ends and backslashes written as \\n and \\\\."""

    def __init__(self) -> None:
        self.path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "octavo" / "history"
        try:
            import readline
        except ImportError:  # a Python built without it: input() still reads lines
            self.readline = None
            return
        self.readline = readline
        readline.set_auto_history(False)  # it would take each line of a message by itself
        readline.set_history_length(LIMIT)
        for message in self._kept():
            readline.add_history(message)

    def add(self, message: str) -> None:
        if self.readline is None or not message.strip():
            return
        self.readline.add_history(message)
        with suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            with self.path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(encoded(message) + "\n")

    def _kept(self) -> list[str]:
        """The latest messages in the file, which is cut to these once it has grown to twice as many."""
        try:
            lines = self.path.read_text("utf-8").split("\n")[:-1]
            if len(lines) > 2 * LIMIT:
                self.path.write_text("\n".join([*lines[-LIMIT:], ""]), "utf-8")
        except (OSError, UnicodeDecodeError):
            return []
        return [decoded(line) for line in lines[-LIMIT:]]


def encoded(message: str) -> str:
    return message.replace("\\", "\\\\").replace("\n", "\\n")


def decoded(line: str) -> str:
    parts = line.split("\\\\")
    return "\\".join(part.replace("\\n", "\n") for part in parts)
