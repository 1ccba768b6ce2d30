"""The engine's side of its clients: one ROUTER socket, and for each client what was sent, taken in, and that it lives.

No torch.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import zmq

from octavo.engine.adapters import LoadedAdapter
from octavo.engine.messages import (
    Ack,
    AdapterNews,
    EngineFacts,
    Failed,
    FromEngine,
    Hello,
    Progress,
    Ready,
    ToEngine,
    decode_to_engine,
    encode,
)  # fmt: skip
from octavo.engine.process import is_locked, lock_path, socket_address
from octavo.engine.pulse import Pulse
from octavo.errors import OctavoError, to_wire

log = logging.getLogger(__name__)

CLIENT_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
MESSAGES_AT_ONCE = 1024
PROGRESS_INTERVAL_S = 0.1
FIRST_HELLO_S = 10.0
"""how long an engine that cannot start waits for somebody to tell it to"""


@dataclass
class Link:
    sent: int = 0
    acknowledged: int = 0


class Links:
    """`receive` answers Hello and Ack by itself and hands out the rest. Belongs to the main thread."""

    def __init__(self, directory: str, max_unacked: int) -> None:
        self.directory = directory
        self.links: dict[str, Link] = {}
        self._max_unacked = max_unacked
        self._facts: EngineFacts | None = None
        self._adapters: list[LoadedAdapter] = []
        self._pulse = Pulse(directory)
        self._early: list[tuple[str, ToEngine]] = []
        self._progress: Progress | None = None
        self._last_progress = 0.0
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # our own count of unacknowledged messages is the bound
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.bind(socket_address(directory))
        self._wake_here, self.wake_fd = _wake_pair()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_here, zmq.POLLIN)

    def receive(self, timeout_s: float | None) -> list[tuple[str, ToEngine]]:
        """Messages that lie here, waiting up to `timeout_s` (None: for ever) for one; a signal ends the wait too."""
        received, self._early = self._early, []
        if not received:
            self._poller.poll(None if timeout_s is None else int(timeout_s * 1000))
        self._pulse.turn()
        with suppress(BlockingIOError):
            self._wake_here.recv(64)
        for _ in range(MESSAGES_AT_ONCE):
            try:
                identity, raw = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            except ValueError:
                continue  # not two frames: none of our clients
            message = self._take_in(identity.decode(errors="replace"), raw)
            if message is not None:
                received.append(message)
        return received

    def _take_in(self, client_id: str, raw: bytes) -> tuple[str, ToEngine] | None:
        try:
            message = decode_to_engine(raw)
        except msgspec.MsgspecError as err:
            log.warning("a message of client %r makes no sense: %s", client_id, err)
            return None
        if isinstance(message, Hello) and CLIENT_ID.fullmatch(client_id):
            self.links.setdefault(client_id, Link())
            greeting = self._progress if self._facts is None else Ready(self._facts, self._adapters)
            if greeting is not None:
                self.send(client_id, greeting)
        elif client_id not in self.links:
            log.warning("a message of client %r, which has not said hello, is ignored", client_id)
        elif isinstance(message, Ack):
            self.links[client_id].acknowledged = message.sequence
        else:
            return client_id, message
        return None

    def wake(self) -> None:
        """Ends a wait in `receive`. From any thread."""
        with suppress(BlockingIOError, OSError):
            os.write(self.wake_fd, b"\0")

    def send(self, client_id: str, message: FromEngine) -> None:
        self._socket.send_multipart([client_id.encode(), encode(message)])

    def next_sequence(self, client_id: str) -> int:
        self.links[client_id].sent += 1
        return self.links[client_id].sent

    def paused(self) -> frozenset[str]:
        """Clients that leave too much unacknowledged."""
        return frozenset(c for c, k in self.links.items() if k.sent - k.acknowledged > self._max_unacked)

    def departed(self) -> list[str]:
        """Clients that no longer hold their lock; they are forgotten."""
        gone = [client_id for client_id in self.links if not is_locked(lock_path(self.directory, client_id))]
        for client_id in gone:
            del self.links[client_id]
            lock_path(self.directory, client_id).unlink(missing_ok=True)
        return gone

    # -- start and end -------------------------------------------------------------------------------------------------

    def progress(self, stage: str, done: int, total: int) -> None:
        """Tells everyone how far the start is, a few times a second."""
        now = time.monotonic()
        if now - self._last_progress < PROGRESS_INTERVAL_S and done < total:
            return
        self._last_progress = now
        self._progress = Progress(stage, done, total)
        told = list(self.links)
        self._early += self.receive(0)  # tells those who are new
        for client_id in told:
            self.send(client_id, self._progress)

    def ready(self, facts: EngineFacts, adapters: list[LoadedAdapter]) -> None:
        self._early += self.receive(0)
        self._facts, self._adapters = facts, adapters
        for client_id in self.links:
            self.send(client_id, Ready(facts, adapters))

    def tell_adapters(
        self, adapters: list[LoadedAdapter], caller: str, call: int, error: dict[str, object] | None
    ) -> None:
        """Answers a call, and tells the other clients where it changed something."""
        for client_id in self.links:
            if client_id == caller:
                self.send(client_id, AdapterNews(adapters, call, error))
            elif error is None:
                self.send(client_id, AdapterNews(adapters))
        self._adapters = adapters

    def fail(self, error: OctavoError) -> bool:
        """Tells everyone why the engine ends, so that they can say so; False when nobody is here.

        One that cannot even start waits for its first client.
        """
        give_up = time.monotonic() + FIRST_HELLO_S
        while self._facts is None and not self.links and time.monotonic() < give_up:
            self.receive(0.1)
        for client_id in self.links:
            self.send(client_id, Failed(to_wire(error)))
        return bool(self.links)

    def close(self) -> None:
        """Returns once what was sent is delivered, or after two seconds."""
        self._socket.close()
        self._context.term()


def _wake_pair() -> tuple[socket.socket, int]:
    """(readable end, descriptor for `signal.set_wakeup_fd`), both non-blocking."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    return reader, os.dup(writer.fileno())
