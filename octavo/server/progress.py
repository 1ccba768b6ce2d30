"""How far loading has come: a bar on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from octavo.engine import messages

log = logging.getLogger("octavo.server")
SECONDS_BETWEEN_LINES = 10.0


class LoadingBar:
    """A context manager; `update` may be called from any thread."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        if sys.stderr is not None and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.tasks: dict[str, TaskID] = {}
        self.lines = LoadingLines()

    def __enter__(self) -> LoadingBar:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, progress: messages.Progress) -> None:
        stage, done, total = progress.stage, progress.done, progress.total
        if self.bar is None:
            self.lines.update(stage, done, total)
            return
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total)
        self.bar.update(self.tasks[stage], completed=done, total=total, refresh=done >= total)


class LoadingLines:
    """Of each stage one line at its start, one at its end, and one every ten seconds between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.ended: set[str] = set()

    def update(self, stage: str, done: int, total: int) -> None:
        now = self.clock()
        if stage in self.ended:
            return
        if stage not in self.started:
            self.started[stage] = self.last[stage] = now
            log.info("%s: %s", stage, decimal(total) if total else "…")
        if total == 0:
            return  # nobody knows how much it is
        if done >= total:
            self.ended.add(stage)
            log.info("%s: done in %.1f s", stage, now - self.started[stage])
        elif now - self.last[stage] >= SECONDS_BETWEEN_LINES:
            self.last[stage] = now
            log.info("%s: %s of %s", stage, decimal(done), decimal(total))
