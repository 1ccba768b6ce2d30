"""What uvicorn leaves open: connections that say nothing or stop in the middle of a request, and how many there are.

While the client owes something (the head of a request within `ARRIVAL_S`, further bytes of a body every `ARRIVAL_S`)
its connection is closed after that time. At `max_connections` the one that has owed longest makes room for a new one;
only when all are busy with answers is the new one told 503.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.wire.errors import error_body

ARRIVAL_S = 30.0
KEEP_ALIVE_S = 5
"""between two requests of a connection"""
MAX_CONNECTIONS = 4096
RESERVED_SHARE = 4
"""of this many free descriptors one is kept for files and for connections that are being closed"""


def max_connections() -> int:
    """As many as the system's limit of open files allows, after raising it as far as this user may."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    free = soft - len(os.listdir("/dev/fd"))
    return max(4, min(MAX_CONNECTIONS, free - free // RESERVED_SHARE))


def protocol(limit: int) -> type[BoundedProtocol]:
    """For uvicorn's `http`."""
    return type("LimitedProtocol", (BoundedProtocol,), {"max_connections": limit})


class BoundedProtocol(HttpToolsProtocol):
    """Relies on uvicorn's `connections`, `cycle`, `flow` and `pipeline`."""

    max_connections = MAX_CONNECTIONS
    arrival_s = ARRIVAL_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head, self._complete = True, False
        """of the request that is arriving, or expected"""
        self._since = self.loop.time()
        """when the client was last in no debt, or paid some of it"""
        self._closing = self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _owes(self) -> bool:
        """Also between two requests; not while one that has come whole is being answered, whatever follows it."""
        being_answered = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        return not being_answered and not self.pipeline

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.max_connections and not self._make_room():
            body = error_body("too many connections; fix: try again later", "ServiceUnavailableError", 503)
            head = f"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: {len(body)}\r\n"
            transport.write(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + body)
            self._refused = True
            transport.close()
            return
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.arrival_s, self._look)

    def _make_room(self) -> bool:
        """Closes the connection that has owed longest; false when none owes anything."""
        others = [one for one in self.connections if isinstance(one, BoundedProtocol) and one._owes]
        if not others:
            return False
        longest = min(others, key=lambda one: one._since)
        longest.transport.abort()
        self.connections.discard(longest)
        return True

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._complete and self._owes:
            self._complete, self._in_head, self._since = False, True, self.loop.time()
        elif not self._in_head:
            self._since = self.loop.time()
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._complete, self._in_head, self._since = False, True, self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._since = False, self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._complete = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._refused:
            super().connection_lost(exc)

    def _look(self) -> None:
        """Closes what owes too long, and cuts what does not even close, as its client takes nothing."""
        if self._closing:
            self.transport.abort()
            return
        wait = self._since + self.arrival_s - self.loop.time()
        late = self._owes and not self._complete and not self.flow.read_paused and wait <= 0
        if late:
            self.transport.close()
        self._closing = self.transport.is_closing()
        self._timer = self.loop.call_later(wait if wait > 0 else self.arrival_s, self._look)
