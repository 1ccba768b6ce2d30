"""The thread that reads and writes the blocks of a `BlockFolder`, so that the engine's loop never waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from octavo.engine.block_folder import BlockFolder

log = logging.getLogger(__name__)

MAX_QUEUED_WRITES = 256


@dataclass(eq=False)
class Transfer:
    """One block on its way between a host slot and the disk."""

    write: bool
    group: int
    key: bytes
    slot: int
    content: memoryview
    ok: bool = False
    """it is there; set by the thread, with `seconds`, before it hands the transfer back"""
    seconds: float = 0.0
    done: bool = False
    """handed back; from then on the slot need not be held"""
    abandoned: bool = False
    """nobody waits for it any more"""


class DiskTier:
    """`write` and `read` return at once, `finished` hands back what is done. Reads go first: a request waits."""

    def __init__(
        self, folder: BlockFolder, wake: Callable[[], None], max_queued_writes: int = MAX_QUEUED_WRITES
    ) -> None:
        """`wake` is called, in the thread, when a read is done."""
        self._folder, self._wake, self._max_queued_writes = folder, wake, max_queued_writes
        self._reads: deque[Transfer] = deque()
        self._writes: deque[Transfer] = deque()
        self._queued: set[tuple[int, bytes]] = set()
        """blocks to be written"""
        self._changed = threading.Condition()
        self._finished: queue.SimpleQueue[Transfer] = queue.SimpleQueue()
        self._closed = self._failed = False
        self._thread = threading.Thread(target=self._work, name="disk-tier", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        return self._folder.num_bytes

    def has(self, group: int, key: bytes, size: int) -> bool:
        return self._folder.has(group, key, size)

    def wants(self, group: int, key: bytes, size: int) -> bool:
        """Whether this block is neither there nor on its way there, and can be stored."""
        return not (self._failed or (group, key) in self._queued or self.has(group, key, size))

    def write(self, transfer: Transfer) -> bool:
        """False when too many wait already: the block is not written then, and the slot not kept."""
        with self._changed:
            if len(self._writes) >= self._max_queued_writes:
                return False
            self._writes.append(transfer)
            self._queued.add((transfer.group, transfer.key))
            self._changed.notify()
        return True

    def read(self, transfer: Transfer) -> None:
        with self._changed:
            self._reads.append(transfer)
            self._changed.notify()

    def finished(self) -> list[Transfer]:
        """What is done since the last call."""
        finished = [self._finished.get_nowait() for _ in range(self._finished.qsize())]
        for transfer in finished:
            transfer.done = True
        return finished

    def close(self, drain_s: float = 0.0) -> None:
        """Ends the thread, after what is queued or after `drain_s`."""
        give_up = time.monotonic() + drain_s
        with self._changed:
            while self._writes and not self._failed and time.monotonic() < give_up:
                self._changed.wait(give_up - time.monotonic())
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=max(1.0, drain_s))
        if not self._thread.is_alive():
            self._folder.close()

    def _work(self) -> None:
        while (transfer := self._next()) is not None:
            begin = time.monotonic()
            try:
                act = self._write if transfer.write else self._read
                transfer.ok = act(transfer)
            except Exception as err:  # a disk must never end the engine
                self._give_up(transfer, err)
            transfer.seconds = time.monotonic() - begin
            self._end(transfer)

    def _next(self) -> Transfer | None:
        with self._changed:
            while not (self._reads or self._writes or self._closed):
                self._changed.wait()
            if self._closed:
                return None
            return self._reads.popleft() if self._reads else self._writes.popleft()

    def _read(self, transfer: Transfer) -> bool:
        return self._folder.read(transfer.group, transfer.key, transfer.content)

    def _write(self, transfer: Transfer) -> bool:
        return not self._failed and self._folder.write(transfer.group, transfer.key, transfer.content)

    def _end(self, transfer: Transfer) -> None:
        with self._changed:
            if transfer.write:
                self._queued.discard((transfer.group, transfer.key))
            self._finished.put(transfer)
            self._changed.notify_all()
        if not transfer.write:
            self._wake()

    def _give_up(self, transfer: Transfer, err: Exception) -> None:
        verb = "written; no more will be until the next start" if transfer.write else "read"
        if not self._failed:
            log.warning("a KV block cannot be %s: %s", verb, err)
        self._failed = self._failed or transfer.write
