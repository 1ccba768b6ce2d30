"""From settings to a running server and back to an exit code. `serve` is what `octavo serve` calls."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import shlex
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import uvicorn
from starlette.types import ASGIApp

import octavo
from octavo.config import GIB, EngineArgs, EngineConfig, ServerArgs
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.messages import EngineFacts
from octavo.errors import EngineDead, OctavoError, UsageError
from octavo.server.app import Handler, build_app
from octavo.server.connections import KEEP_ALIVE_S, max_connections, protocol
from octavo.server.progress import LoadingBar
from octavo.server.serving import Serving

log = logging.getLogger("octavo.server")
SEND_BUFFER_BYTES = 256 << 10
"""the system's buffer of each connection: enough for any stream, and a bound on what a slow client can hold there"""
DEATH_NOTICE_S = 2.0
"""how long a server without engine still answers 503, so that clients and probes learn why it goes"""
GRACEFUL_CLOSE_S = 5
"""for connections to take their last bytes once nothing is generated any more"""


def serve(engine_args: EngineArgs, server_args: ServerArgs, routes: Mapping[str, Handler] | None = None) -> int:
    """Serves until a signal or the engine's end; returns the exit code. A user's mistake is one line on stderr.

    `routes` are further paths to POST to.
    """
    _set_up_logging(server_args.log_level)
    try:
        server_args.verify()
        with bound(server_args.host, server_args.port) as sock:
            return _run(_serve(engine_args, server_args, sock, routes or {}))
    except OctavoError as err:
        _say(f"octavo: error: {err}", sys.stderr)
        return err.exit_code


def _say(text: str, stream: TextIO) -> None:
    """To whoever still listens: a server lives on when its log has been closed or is full."""
    with suppress(OSError):
        print(text, file=stream, flush=True)


def _run(main: Coroutine[Any, Any, int]) -> int:
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    if level != "debug":  # its account of starting and stopping repeats ours
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket at that address, not listening yet. Raises UsageError when it cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except (OSError, OverflowError, UnicodeError) as err:
        raise UsageError(f"cannot listen on {host}:{port}: {err}", fix="correct --host and --port") from err
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        try:
            sock.bind(address)
        except (OSError, OverflowError) as err:
            taken = isinstance(err, OSError) and err.errno == errno.EADDRINUSE
            cause = "the port is taken" if taken else getattr(err, "strerror", None) or str(err)
            fix = "choose another --port or stop what listens there" if taken else "correct --host and --port"
            raise UsageError(f"cannot listen on {host}:{port}: {cause}", fix=fix, param="port") from err
        yield sock


class Signals:
    """The first SIGTERM or SIGINT asks to finish, the second to stop at once."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours."""
        yield


async def _serve(
    engine_args: EngineArgs, server_args: ServerArgs, sock: socket.socket, routes: Mapping[str, Handler]
) -> int:
    signals = Signals()
    llm = await _loaded(engine_args, server_args.max_buffered_events, signals)
    if llm is None:
        return 0
    try:
        serving = Serving(llm, server_args)
        server = _Server(_config(build_app(serving, routes), server_args.access_log))
        running = asyncio.ensure_future(server.serve(sockets=[sock]))
        await _first_of(None, server.ready.wait(), running)
        _announce(serving, sock)
        code = await _until_end(serving, running, signals)
        server.should_exit = True
        if signals.second.is_set():
            server.force_exit = True
        await running
        return code
    finally:
        await llm.shutdown()


async def _loaded(args: EngineArgs, limit: int, signals: Signals) -> AsyncLLM | None:
    """The engine, or None when a signal came first."""
    with LoadingBar() as bar:
        loading = asyncio.ensure_future(AsyncLLM.create(args, bar.update, max_buffered_events=limit))
        stopped = asyncio.ensure_future(signals.first.wait())
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if loading.done():
            return loading.result()
        loading.cancel()
        with suppress(asyncio.CancelledError):
            await loading
        return None


def _config(app: ASGIApp, access_log: bool) -> uvicorn.Config:
    return uvicorn.Config(
        app, log_config=None, access_log=access_log, lifespan="off", ws="none", http=protocol(max_connections()),
        timeout_keep_alive=KEEP_ALIVE_S, server_header=False, timeout_graceful_shutdown=GRACEFUL_CLOSE_S,
    )  # fmt: skip


async def _until_end(serving: Serving, running: asyncio.Future[None], signals: Signals) -> int:
    """Waits for what ends the server, and for running requests after a signal. The exit code."""
    died = asyncio.ensure_future(serving.llm.wait_dead())
    asked = asyncio.ensure_future(signals.first.wait())
    await asyncio.wait((died, asked, running), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if died.done():
        log.error("%s", died.result())
        await _first_of(DEATH_NOTICE_S, signals.first.wait())
        return EngineDead.exit_code
    if asked.done() and not running.done():
        serving.draining = True
        limit = serving.args.shutdown_timeout_s
        if count := serving.open_requests:
            noun, them = ("request", "it") if count == 1 else ("requests", "them")
            log.info("finishing %d open %s, at most %g s; a second signal ends %s", count, noun, limit, them)
        await _first_of(limit, serving.idle.wait(), signals.second.wait(), died)
        await serving.llm.shutdown()
    died.cancel()
    return 0


async def _first_of(timeout_s: float | None, *events: Coroutine[Any, Any, object] | asyncio.Future[Any]) -> None:
    """Waits for one of them. Coroutines are cancelled after that, futures are not."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task, event in zip(tasks, events, strict=True):
        if task is not event:
            task.cancel()


def _announce(serving: Serving, sock: socket.socket) -> None:
    facts, base = serving.llm.facts, _base_url(*sock.getsockname()[:2])
    model = serving.llm.model_names[0]
    simulated = facts.device == "sim"
    if simulated:
        _say("octavo: warning: --device sim computes nothing: the text of all answers is made up", sys.stderr)
    how = f"taking the time of {facts.kernels}" if simulated else f"{facts.kernels} kernels"
    lines = [
        f"Octavo {octavo.__version__} serves {model} on {facts.device} ({facts.dtype}, {how},"
        f" context {facts.max_model_len} tokens)",
        f"  chat page  {base}/",
        f"  try        {example(base, model, keyed=bool(serving.args.api_keys))}",
    ]
    if extras := unusual(serving.llm.config, facts, len(serving.llm.adapters)):
        lines.insert(1, f"  with       {', '.join(extras)}")
    _say("\n".join(lines), sys.stdout)


def unusual(config: EngineConfig, facts: EngineFacts, adapters: int) -> list[str]:
    """What a server does that one without any flags on the CPU does not, in words."""
    said = []
    if facts.kv_cache_dtype != facts.dtype:
        said.append(f"KV cache in {facts.kv_cache_dtype}")
    if (guesses := config.speculative_config) is not None:
        said.append(f"{guesses.num_speculative_tokens} tokens guessed ahead by {guesses.method}")
    if config.kv_offloading_bytes:
        said.append(f"{config.kv_offloading_bytes / GIB:g} GiB of host memory for KV blocks")
    if config.kv_offloading_dir is not None:
        said.append(f"{config.kv_offloading_dir_bytes / GIB:g} GiB for them in {config.kv_offloading_dir}")
    if not facts.prefix_caching:
        said.append("no prefix cache")
    wanted = facts.asynchronous if config.async_scheduling is None else config.async_scheduling
    if wanted and guesses is None:
        said.append("overlapped loop")
    if config.enable_lora:
        said.append(f"adapters ({adapters} of at most {config.max_loras} loaded)")
    if config.tensor_parallel_size > 1:
        said.append(f"{config.tensor_parallel_size} ranks")
    if config.scheduling_policy != "fcfs":
        said.append(f"scheduling by {config.scheduling_policy}")
    return said


def _base_url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def example(base: str, model: str, *, keyed: bool) -> str:
    """A command line to try the server with. KEY stands for a key that is needed: a log is no place for a secret."""
    question = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    headers = ["Content-Type: application/json", *(["Authorization: Bearer KEY"] if keyed else [])]
    words = ["curl", f"{base}/v1/chat/completions", *(word for header in headers for word in ("-H", header))]
    line = shlex.join([*words, "-d", json.dumps(question, ensure_ascii=False)])
    return f"{line}\n             (KEY: one of those given with --api-key or OCTAVO_API_KEY)" if keyed else line
