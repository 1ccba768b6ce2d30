"""Pure ASGI layers around the application; none buffers a body, so that streams pass untouched."""

from __future__ import annotations

import hmac
import re
import time
import uuid
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import InvalidRequest, OctavoError
from octavo.server.replies import error_response, json_response

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
WORK = ("/v1", "/generate")
"""paths that make the engine work, and so need a key and count as open requests"""
Observe = Callable[[str, str, int, float], None]
"""called with handler, method, status and seconds"""


class BodyTooLarge(InvalidRequest):
    status, kind = 413, "RequestEntityTooLarge"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__("the body is too large", limit=f"{limit_bytes} bytes", fix="send a smaller request")


class RequestId:
    """Takes a client's X-Request-Id when it is harmless, draws one otherwise, and sends it back.

    Handlers find it in `request.state.request_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = _header(scope, b"x-request-id")
        request_id = given if given and REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        return await self.app(scope, receive, with_id)


class HeadAsGet:
    """HEAD is answered like GET; the server leaves the body away."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        return await self.app(scope, receive, send)


class Observed:
    """Tells `observe` of every answered request."""

    def __init__(self, app: ASGIApp, observe: Observe) -> None:
        self.app, self.observe = app, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status = time.monotonic(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            return await self.app(scope, receive, noting)
        finally:
            route: Any = scope.get("route")
            handler = getattr(route, "path", "none")
            self.observe(handler, scope["method"], status, time.monotonic() - start)


class Authenticated:
    """Asks for one of the keys on `WORK` paths; the others stay open for probes and dashboards."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self.digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"].startswith(WORK)
        if not guarded or self._allowed(_header(scope, b"authorization") or ""):
            return await self.app(scope, receive, send)
        return await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)

    def _allowed(self, authorization: str) -> bool:
        """Compares with every key, in a time that says nothing about where they differ."""
        scheme, _, key = authorization.partition(" ")
        digest = sha256(key.encode("latin-1")).digest()  # the bytes as they were sent
        matches = [hmac.compare_digest(digest, ours) for ours in self.digests]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Raises BodyTooLarge where the handler reads, once more than `limit_bytes` have come or are announced."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self.app, self.limit_bytes = app, limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = _header(scope, b"content-length") or "0"
        too_large = announced.isdigit() and int(announced) > self.limit_bytes
        received = 0

        async def counting() -> Message:
            nonlocal received
            if too_large:
                raise BodyTooLarge(self.limit_bytes)
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.limit_bytes:
                raise BodyTooLarge(self.limit_bytes)
            return message

        return await self.app(scope, counting, send)


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


class Gate(Protocol):
    def admit(self) -> None: ...
    def release(self) -> None: ...


class Admitted:
    """Counts POSTs to `WORK` paths as open, first byte to last of the answer; the gate may refuse them."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self.app, self.gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(WORK):
            return await self.app(scope, receive, send)
        try:
            self.gate.admit()
        except OctavoError as err:
            return await error_response(err)(scope, receive, send)
        try:
            return await self.app(scope, receive, send)
        finally:
            self.gate.release()
