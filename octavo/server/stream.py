"""From deltas to a client: merging the prompts of one request, server-sent events, and noticing departures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.outputs import ChoiceDelta
from octavo.errors import OctavoError
from octavo.wire.errors import INTERNAL, body_of
from octavo.wire.responses import DONE, frame

log = logging.getLogger("octavo.server")
T = TypeVar("T")
CLIENT_GONE = 499
"""nginx's status for a client that left; only logs and metrics see it"""
Deltas = AsyncGenerator[list[ChoiceDelta], None]
Frames = AsyncGenerator[bytes, None]


class ClientGone(Exception):
    """The client closed its connection before the answer was done."""


async def merged(streams: Sequence[Deltas]) -> AsyncGenerator[tuple[int, list[ChoiceDelta]], None]:
    """(prompt index, deltas) of several prompts as they come. Closing it ends all of them.

    Reads no further ahead than one item a prompt: what a slow client leaves waiting is counted by the engine's client.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for deltas in only:
                yield 0, deltas
        return
    waiting: asyncio.Queue[tuple[int, list[ChoiceDelta] | Exception | None]] = asyncio.Queue(1)
    pumps = [asyncio.ensure_future(_pump(i, stream, waiting)) for i, stream in enumerate(streams)]
    running = len(pumps)
    try:
        while running:
            index, item = await waiting.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, stream: Deltas, waiting: asyncio.Queue[tuple[int, list[ChoiceDelta] | Exception | None]]
) -> None:
    """Ends with None or the stream's error in the queue, unless it is cancelled."""
    end: Exception | None = None
    try:
        async with aclosing(stream):
            async for deltas in stream:
                await waiting.put((index, deltas))
    except Exception as err:
        end = err
    await waiting.put((index, end))


async def until_gone(request: Request, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first. Raises ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: the frames of an iterator, then [DONE], also after an error in mid-stream.

    The iterator is closed at once when the client leaves.
    """

    media_type = "text/event-stream"
    end = DONE

    @staticmethod
    def failure(body: bytes) -> bytes:
        """How the body of an error stands in the stream."""
        return frame(body)

    def __init__(self, frames: Frames, first: bytes = b"") -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.frames, self.first = frames, first

    @classmethod
    async def begun(cls, request: Request, frames: Frames) -> EventStream:
        """Waits for the first frame, so that a failure before it becomes a proper HTTP status."""
        return cls(frames, await until_gone(request, _first(frames)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sender, gone), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            for each in (sender, gone):
                each.cancel()
            await asyncio.gather(sender, gone, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        async with aclosing(self.frames):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._whole():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": self.end})

    async def _whole(self) -> Frames:
        """The frames, and what went wrong in making them as the last one."""
        try:
            yield self.first
            async for data in self.frames:
                yield data
        except OctavoError as err:
            if err.status == 500:
                log.error("a stream failed: %s", err)
            yield self.failure(body_of(err))
        except Exception:
            log.exception("a stream failed")
            yield self.failure(INTERNAL)


async def _first(frames: Frames) -> bytes:
    async for data in frames:
        return data
    return b""
