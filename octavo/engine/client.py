"""An API process's side of the engine: starts it, sends requests, hands out token events, and knows when it is dead.

No torch; asyncio. Every choice of every request that `generate` has begun gets exactly one terminal event, whatever
happens to the engine.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import resource
import sys
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.engine.adapters import LoadedAdapter
from octavo.engine.messages import (
    Abort,
    Ack,
    AdapterNews,
    AddRequest,
    EngineFacts,
    Failed,
    FromEngine,
    Hello,
    LoadAdapter,
    Outputs,
    Ping,
    Progress,
    Ready,
    Shutdown,
    Stats,
    ToEngine,
    UnloadAdapter,
    decode_from_engine,
    encode,
)  # fmt: skip
from octavo.engine.process import Child, lock_path, make_directory, remove_directory, socket_address, sweep_directories
from octavo.engine.pulse import read_pulse
from octavo.engine.types import MAX_CHOICES, Request, TokenEvent
from octavo.errors import (
    EngineDead,
    EngineHangs,
    InvalidRequest,
    OctavoError,
    Overloaded,
    UsageError,
    from_wire,
    to_wire,
)

MIN_OPEN_FILES = 64
ANSWER_S = 1.0
"""how long the loop of a healthy engine may take to answer; in a long step it cannot"""
STOPPED_S = 1.5
"""without a beat of its side thread, which beats every quarter of a second, an engine's process does not run"""
LONGEST_STEP_S = 60.0
"""longer than any sane step, even of a large prefill on a small CPU"""
ENGINE_PROGRAM = (sys.executable, "-m", "octavo.engine.core")
END_S = 5.0
"""how long an engine may take to end once nobody wants it any more"""


class EngineClient:
    """One connection to one engine; belongs to one event loop. Made by `start` or `attach`."""

    facts: EngineFacts

    def __init__(self, directory: str, max_buffered_events: int, owns_engine: bool) -> None:
        self.directory = directory
        self._owns_engine = owns_engine
        self._pid = os.getpid()
        self.stats = Stats()
        """as of the latest message"""
        self.timings: dict[str, list[float]] = {}
        """request id to [queued, first scheduled], seconds since the epoch, of open requests that have a token"""
        self.adapters: dict[str, LoadedAdapter] = {}
        """by name, as of the engine's latest word"""
        self.error: OctavoError | None = None
        """why there will be no more answers; None while the engine lives"""
        self._max_buffered_events = max_buffered_events
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._call_numbers = itertools.count()
        self._child: Child | None = None
        self._sequence = 0
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineFacts] = self._loop.create_future()
        self._died = asyncio.Event()
        self._exited = asyncio.Event()
        """set once our child is gone"""
        self._answered = asyncio.Event()
        self._on_progress: Callable[[Progress], None] = lambda _: None
        self._client_id = uuid.uuid4().hex
        self._lock = _hold_lock(directory, self._client_id)
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.RECONNECT_IVL, 20)):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, self._client_id.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._socket.connect(socket_address(directory))
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._loop.add_reader(self._monitor.fileno(), self._connection_changed)
        self._loop.call_soon(self._receive)  # their descriptors tell of nothing before a first look
        self._loop.call_soon(self._connection_changed)

    # -- life of the engine --------------------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls, config: EngineConfig, on_progress: Callable[[Progress], None] | None = None, *,
        max_buffered_events: int = 4096, log_prefix: str = "engine: ", program: Sequence[str] = ENGINE_PROGRAM,
    ) -> EngineClient:  # fmt: skip
        """Starts an engine and waits until it is ready.

        `max_buffered_events` are held for a consumer of `generate` that is slow; beyond it its request is aborted.
        Raises the engine's own typed error when it cannot start, EngineDead when it dies on the way.
        """
        _check_open_files()
        sweep_directories()
        directory = make_directory()
        try:
            client = cls(directory, max_buffered_events, owns_engine=True)
        except (OSError, zmq.ZMQError) as err:
            remove_directory(directory)
            raise UsageError(f"the engine's socket cannot be made: {err}", fix="free what it lacks") from err
        spawning = asyncio.ensure_future(client._spawn(program, _settings(config, directory, log_prefix)))
        try:
            await asyncio.shield(spawning)
            await client._greet(on_progress)
        except BaseException:
            await asyncio.wait([spawning])
            await client._end()
            raise
        return client

    @classmethod
    async def attach(
        cls, directory: str, on_progress: Callable[[Progress], None] | None = None, *, max_buffered_events: int = 4096,
    ) -> EngineClient:  # fmt: skip
        """A further client of a running engine, known by its directory. Raises EngineDead when none answers there."""
        try:
            client = cls(directory, max_buffered_events, owns_engine=False)
        except OSError as err:
            raise EngineDead(f"no engine is in {directory}: {err}", fix="give the directory of a running one") from err
        try:
            await client._greet(on_progress)
        except BaseException:
            await client.close()
            raise
        return client

    async def _spawn(self, program: Sequence[str], settings: dict[str, Any]) -> None:
        def exited(status: str, last_line: str) -> None:
            said = f", its last words: {last_line}" if last_line else ""
            with suppress(RuntimeError):  # the loop may be closed by now
                self._loop.call_soon_threadsafe(self._child_exited, EngineDead(f"the engine ended ({status}){said}"))

        self._child = await asyncio.to_thread(Child, program, settings, self.directory, exited)

    async def _greet(self, on_progress: Callable[[Progress], None] | None) -> None:
        self._on_progress = on_progress or self._on_progress
        self._send(Hello())
        self.facts = await self._ready

    @property
    def is_dead(self) -> bool:
        return self.error is not None

    async def died(self) -> OctavoError:
        """Waits for the engine's end, and returns its cause."""
        await self._died.wait()
        assert self.error is not None
        return self.error

    async def check_health(self, longest_step_s: float = LONGEST_STEP_S) -> None:
        """Returns when the engine's loop has answered, or may well be in a long step; within about a second.

        Raises EngineDead when it is dead, its process does not run, or its loop has not turned for `longest_step_s`.
        """
        self._raise_if_dead()
        self._answered.clear()
        self._send(Ping())
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._answered.wait(), ANSWER_S)
        self._raise_if_dead()
        if not self._answered.is_set():
            self._look_for_life(longest_step_s)

    def _look_for_life(self, longest_step_s: float) -> None:
        try:
            beat_s, turn_s = read_pulse(self.directory)
        except OSError as err:
            raise EngineDead(f"the engine is gone from {self.directory}") from err
        if beat_s > STOPPED_S:
            raise EngineHangs(
                f"the engine has not stepped for {turn_s:.0f} s, and its process does not run",
                limit=f"{STOPPED_S} s", fix="continue or restart it",
            )  # fmt: skip
        if turn_s > longest_step_s:
            raise EngineHangs(
                f"the engine has not stepped for {turn_s:.0f} s", limit=f"{longest_step_s:g} s for a step",
                fix="see its log, or restart it",
            )  # fmt: skip

    async def shutdown(self, drain: bool = False, timeout_s: float = 10.0) -> None:
        """Ends the engine: after its running requests (`drain`) or at once; by force after `timeout_s`. And closes.

        In a fork of the process whose engine it is, both are left alone, as by `close`.
        """
        if self._pid != os.getpid():
            return
        if not self.is_dead:
            self._send(Shutdown(drain))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._died.wait(), timeout_s)
        await self._end()

    async def _end(self) -> None:
        if self._child is not None:
            if not self.is_dead:
                self._child.kill()
            self._child.close()
            with suppress(asyncio.TimeoutError):  # it may have told us why it ends before it has
                await asyncio.wait_for(self._exited.wait(), END_S)
            if not self._exited.is_set():
                self._child.kill()
        if self._owns_engine:
            remove_directory(self.directory)
        await self.close()

    async def close(self) -> None:
        """Leaves the engine alone; what this client asked for ends."""
        if self._socket.closed or self._pid != os.getpid():
            return
        self._die(EngineDead("this client of the engine is closed"))
        for sock in (self._socket, self._monitor):
            self._loop.remove_reader(sock.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()
        os.close(self._lock)

    def _child_exited(self, error: OctavoError) -> None:
        self._exited.set()
        self._ended(error)

    def _ended(self, error: OctavoError) -> None:
        """The engine is gone; what it sent before still counts."""
        if not self._socket.closed:
            self._receive()
        self._die(error)

    def _die(self, error: OctavoError) -> None:
        """The engine answers no more: ends every open choice with `error`. Only the first cause counts."""
        if self.error is not None:
            return
        self.error = error
        for stream in self._streams.values():
            stream.fail(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._died.set()
        self._answered.set()

    def _raise_if_dead(self) -> None:
        raise_if_forked(self._pid)
        if self.error is not None:
            raise self.error

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[list[TokenEvent], None]:
        """All events that have come since the last round, until each choice has ended.

        The request is sent when iteration begins; closing the iterator before its end aborts it in the engine. Raises
        EngineDead when the engine is dead by then, InvalidRequest for an id in use, UsageError in a forked process.
        """
        self._raise_if_dead()
        if request.request_id in self._streams:
            raise InvalidRequest(f"request id {request.request_id} is in use", fix="give each request its own id")
        if not 1 <= request.sampling.n <= MAX_CHOICES:
            raise InvalidRequest(f"n is {request.sampling.n}", limit=f"1 to {MAX_CHOICES}", param="n")
        stream = _Stream(request, self._max_buffered_events)
        self._streams[request.request_id] = stream
        self._send(AddRequest(request))
        try:
            while stream.open or stream.events:
                yield await stream.take()
        finally:
            del self._streams[request.request_id]
            self.timings.pop(request.request_id, None)
            if stream.open:
                self._send(Abort(request.request_id))

    def abort(self, request_id: str, choices: Iterable[int] | None = None) -> None:
        """Asks the engine to end choices (all when None); their terminal events come through `generate`."""
        self._send(Abort(request_id, None if choices is None else list(choices)))

    async def load_adapter(self, name: str, path: str, in_place: bool = False) -> None:
        """Returns once requests may name it. Raises what the engine has against it, or EngineDead."""
        await self._call(lambda number: LoadAdapter(number, name, path, in_place))

    async def unload_adapter(self, name: str) -> None:
        """New requests no longer find it, running ones end as they would have. Raises ModelNotFound or EngineDead."""
        await self._call(lambda number: UnloadAdapter(number, name))

    async def _call(self, message: Callable[[int], ToEngine]) -> None:
        self._raise_if_dead()
        number = next(self._call_numbers)
        self._calls[number] = self._loop.create_future()
        self._send(message(number))
        try:
            await self._calls[number]
        finally:
            del self._calls[number]

    # -- messages ------------------------------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        """Never waits: the socket queues without limit, and what is in the queue is bounded by our open requests."""
        if self.is_dead:
            return
        self._socket.send(encode(message), zmq.NOBLOCK)
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._receive)  # the descriptor tells of each change once, and we may have taken it

    def _receive(self) -> None:
        """Takes in all messages that lie here, and acknowledges the last."""
        before = self._sequence
        try:
            while not self._socket.closed:
                self._take_in(decode_from_engine(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            pass
        except msgspec.MsgspecError as err:
            self._die(EngineDead(f"the engine's messages make no sense: {err}"))
        if self._sequence != before:
            self._send(Ack(self._sequence))

    def _take_in(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._take_outputs(message)
        elif isinstance(message, Ready):
            self._take_adapters(message.adapters)
            if not self._ready.done():
                self._ready.set_result(message.facts)
        elif isinstance(message, AdapterNews):
            self._take_adapters(message.loaded)
            call = None if message.call is None else self._calls.get(message.call)
            if call is not None and not call.done():
                call.set_result(None) if message.error is None else call.set_exception(from_wire(message.error))
        elif isinstance(message, Failed):
            self._die(from_wire(message.error))
        elif isinstance(message, Progress):
            self._on_progress(message)

    def _take_adapters(self, loaded: list[LoadedAdapter]) -> None:
        self.adapters = {adapter.name: adapter for adapter in loaded}

    def _take_outputs(self, message: Outputs) -> None:
        expected, self._sequence = self._sequence + 1, message.sequence
        if message.sequence != expected:
            lost = OctavoError(f"messages of the engine were lost: expected {expected}, got {message.sequence}")
            for open_stream in self._streams.values():
                open_stream.fail(lost)
                self._send(Abort(open_stream.request_id))
        self.stats = message.stats
        self._answered.set()
        self.timings.update((name, times) for name, times in message.timings.items() if name in self._streams)
        for event in message.events:
            stream = self._streams.get(event.request_id)
            if stream is not None and not stream.put(event):
                self._send(Abort(event.request_id))

    def _connection_changed(self) -> None:
        """Notices the death of an engine that is not our child; of a child we learn more from its exit."""
        with suppress(zmq.Again):
            while not self._monitor.closed:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                if not self._owns_engine:
                    self._ended(EngineDead(f"the engine is gone: nobody answers in {self.directory}"))


class _Stream:
    """Events of one request on their way to its consumer."""

    def __init__(self, request: Request, max_events: int) -> None:
        self.request_id = request.request_id
        self.open = set(range(request.sampling.n))
        """choices without a terminal event"""
        self.events: list[TokenEvent] = []
        self._max_events = max_events
        self._arrived = asyncio.Event()

    def put(self, event: TokenEvent) -> bool:
        """False when that was too much for a slow consumer: the stream has then ended with errors."""
        if event.choice not in self.open:
            return True  # after an end that we decided on ourselves
        self.events.append(event)
        if event.finish_reason is not None:
            self.open.remove(event.choice)
        self._arrived.set()
        if len(self.events) < self._max_events or not self.open:
            return True
        limit = f"{self._max_events} events waiting"
        self.fail(Overloaded("the client reads too slowly", limit=limit, fix="read the stream faster"))
        return False

    def fail(self, error: OctavoError) -> None:
        """Ends every open choice with `error`."""
        for choice in sorted(self.open):
            event = TokenEvent(self.request_id, choice, finish_reason="error", error=to_wire(error))
            self.events.append(event)
        self.open.clear()
        self._arrived.set()

    async def take(self) -> list[TokenEvent]:
        await self._arrived.wait()
        self._arrived.clear()
        events, self.events = self.events, []
        return events


def _check_open_files() -> None:
    """Raises UsageError for a limit so low that ZeroMQ would abort the whole process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < MIN_OPEN_FILES:
        raise UsageError(
            f"this process may open {allowed} files", limit=f"at least {MIN_OPEN_FILES}", fix="raise it: ulimit -n 1024"
        )


def raise_if_forked(pid: int) -> None:
    """Raises UsageError in a fork of process `pid`: sockets and threads do not work there, and a wait would not end."""
    if os.getpid() != pid:
        raise UsageError(
            f"this engine was started by process {pid}, and this is a fork of it, process {os.getpid()}",
            fix="use it in the process that made it, or make one in each process",
        )


def _settings(config: EngineConfig, directory: str, log_prefix: str) -> dict[str, Any]:
    """What an engine program reads first."""
    whole = replace(config, path=os.path.abspath(config.path))
    return {"config": whole.to_dict(), "directory": directory, "log_prefix": log_prefix}


def _hold_lock(directory: str, client_id: str) -> int:
    """A descriptor that holds the client's lock until it is closed or this process ends. Not inherited by children."""
    path = lock_path(directory, client_id)
    lock = os.open(f"{path}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(f"{path}.new", path)  # so that nobody sees it unlocked
    return lock
