"""How far loading has come: a bar on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from octavo.engine import messages

log = logging.getLogger("octavo.server")
SHARE_BETWEEN_LINES = 0.25


class LoadingBar:
    """A context manager; `update` may be called from any thread."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.tasks: dict[str, TaskID] = {}
        self.logged: dict[str, float] = {}

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
        if self.bar is not None:
            if stage not in self.tasks:
                self.tasks[stage] = self.bar.add_task(stage, total=total)
            self.bar.update(self.tasks[stage], completed=done, total=total)
            return
        share = done / total if total else 1.0
        if share >= 1 or share - self.logged.get(stage, -1.0) >= SHARE_BETWEEN_LINES:
            if self.logged.get(stage) != 1.0:
                log.info("%s: %.0f %% of %.1f MiB", stage, 100 * share, total / (1 << 20))
            self.logged[stage] = min(share, 1.0)
