"""The engine's own loop in this process, with a client in another one, and the time of every step.

The sockets, messages and acknowledgements are those of a server; only HTTP and text are absent.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fcntl import LOCK_EX, flock
from multiprocessing import get_context
from pathlib import Path
from socket import socketpair

import msgspec
import zmq

from octavo.clock import VirtualClock
from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.engine.core import Engine
from octavo.engine.executor import RankExecutor
from octavo.engine.links import Links
from octavo.engine.messages import Ack, AddRequest, Hello, Outputs, Ready, Shutdown, decode_from_engine, encode
from octavo.engine.process import lock_path, socket_address
from octavo.engine.types import Request
from octavo.models.checkpoint import open_checkpoint

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 128001,
}  # fmt: skip
CLIENT = "bench"


@dataclass
class Steps:
    """One entry a turn of the loop that computed something: when it ended, how many tokens it had, and its parts."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """of all threads, which others on the machine disturb less"""
    parts: dict[str, list[float]] = field(default_factory=dict)

    def of(self, tokens: int, seconds: list[float] | None = None) -> list[float]:
        """The `seconds` of the steps with just so many tokens: those in which all of so many sequences generate."""
        return [s for s, n in zip(seconds or self.seconds, self.tokens, strict=True) if n == tokens]


class TimedEngine(Engine):
    """Notes how long each turn took, and how long its parts did."""

    def run(self) -> None:
        self.steps = Steps()
        self._spent: dict[str, float] = {}
        self._last_count, self._last_tokens = 0, 0
        for owner, name, part in (
            (self.links, "receive", "receive"), (self.scheduler, "plan", "plan"), (self.executor, "run", "run"),
            (self.scheduler, "commit", "commit"), (self, "_send_events", "send"),
        ):  # fmt: skip
            setattr(owner, name, self._timed(getattr(owner, name), part))
        self._turn_began, self._cpu_began = time.perf_counter(), time.process_time()
        super().run()

    def _timed(self, call: Callable, part: str) -> Callable:
        self.steps.parts[part] = []
        self._spent[part] = 0.0

        def timed(*arguments):
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._spent[part] += time.perf_counter() - began
                if part == "send":
                    self._end_turn()

        return timed

    def _end_turn(self) -> None:
        now, cpu, stats = time.perf_counter(), time.process_time(), self.scheduler.stats
        if stats.steps > self._last_count:
            self.steps.tokens.append((stats.step_tokens - self._last_tokens) // (stats.steps - self._last_count))
            self.steps.seconds.append(now - self._turn_began)
            self.steps.cpu_seconds.append(cpu - self._cpu_began)
            for part, spent in self._spent.items():
                self.steps.parts[part].append(spent)
        self._last_count, self._last_tokens = stats.steps, stats.step_tokens
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._turn_began, self._cpu_began = now, cpu


def simulated_config(folder: Path, **settings) -> EngineConfig:
    """Of Llama 3 8B on the device that computes nothing; `folder` gets its config.json."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    asked = {"device": "sim", "block_size": 16, "max_num_seqs": 256, "max_model_len": 32768, **settings}
    return resolve(EngineArgs(model=str(folder), **asked), open_checkpoint(folder, weights=False).facts())


def start(config: EngineConfig, directory: str) -> RankExecutor:
    """The executor of `config`; the simulated device takes no time."""
    executor = RankExecutor(config, directory, lambda *_: None)
    device = executor.worker.device
    if hasattr(device, "clock"):
        device.clock = VirtualClock()
    gc.collect()
    gc.freeze()  # as the engine's process does
    return executor


def measure(config: EngineConfig, executor: RankExecutor, requests: list[Request]) -> Steps:
    """Runs the loop until all `requests` have ended."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as directory, _client(directory, requests):
        links = Links(directory, config.max_unacked_messages)
        engine = TimedEngine(config, links, executor)
        links.ready(executor.facts, [])
        try:
            engine.run()
        finally:
            links.close()
    return engine.steps


class MemoryLinks:
    """Stands in for `engine.links.Links` where engine and client are one program: it encodes what would be sent."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.links = {CLIENT: None}
        self.tokens = self.ended = self._sequence = 0
        self._messages = [(CLIENT, AddRequest(request)) for request in requests]
        self._expected = sum(message.request.sampling.n for _, message in self._messages)
        self._wake_here, self._writer = socketpair()
        self._writer.setblocking(False)
        self.wake_fd = self._writer.fileno()

    def receive(self, timeout_s: float | None) -> list:
        if self.ended == self._expected:
            return [(CLIENT, Shutdown(drain=True))]
        taken, self._messages = self._messages, []
        return taken

    def send(self, client_id: str, message: Outputs) -> None:
        encode(message)
        for event in message.events:
            self.tokens += len(event.token_ids)
            self.ended += event.finish_reason is not None

    def next_sequence(self, client_id: str) -> int:
        self._sequence += 1
        return self._sequence

    def paused(self) -> frozenset[str]:
        return frozenset()

    def departed(self) -> list[str]:
        return []


@contextmanager
def _client(directory: str, requests: list[Request]) -> Iterator[None]:
    process = get_context("spawn").Process(target=_ask, args=(directory, [encode(AddRequest(r)) for r in requests]))
    process.start()
    try:
        yield
    finally:
        process.join(30)
        process.kill()


def _ask(directory: str, messages: list[bytes]) -> None:
    """The client: says hello, asks for everything, takes in and acknowledges what comes, and ends the engine."""
    with lock_path(directory, CLIENT).open("w") as lock, zmq.Context() as context:
        flock(lock, LOCK_EX)
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, CLIENT.encode())
        socket.connect(socket_address(directory))
        socket.send(encode(Hello()))
        while not isinstance(decode_from_engine(socket.recv()), Ready):
            pass
        for message in messages:
            socket.send(message)
        expected = sum(msgspec.msgpack.decode(m)["request"]["sampling"].get("n", 1) for m in messages)
        while expected:
            outputs = decode_from_engine(socket.recv())
            if isinstance(outputs, Outputs):
                expected -= sum(event.finish_reason is not None for event in outputs.events)
                socket.send(encode(Ack(outputs.sequence)))
        socket.send(encode(Shutdown(drain=True)))
        socket.close(linger=2000)
