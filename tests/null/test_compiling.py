"""The engine's loop while a grammar is compiled: its request waits, the others do not."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from socket import socketpair

import pytest

from octavo.backends.kv import FullAttention
from octavo.clock import VirtualClock
from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.messages import Abort, AddRequest, EngineFacts, Shutdown
from octavo.engine.pages import KVLayout
from octavo.engine.types import Request, SamplingParams, StructuredOutputsParams
from octavo.errors import UsageError
from tests.null.memory import NullRunner

LAYOUT = KVLayout(4, (FullAttention(1, 1),), (64,))
CONFIG = EngineConfig(
    model="null", path="", device="null", dtype="auto", max_model_len=128, vocab_size=50, eos_token_ids=(),
    block_size=4, gpu_memory_utilization=None, kv_cache_memory_bytes=None, num_gpu_blocks_override=None, max_num_seqs=8,
    max_num_batched_tokens=32, tensor_parallel_size=1, threads=None, seed=0,
)  # fmt: skip


class SlowCompiler:
    """An executor whose grammars are compiled when the test says so."""

    host_memory = None

    def __init__(self) -> None:
        self.layout, self.runner = LAYOUT, NullRunner(LAYOUT, 50, 8)
        self.facts = EngineFacts(0, "null", "none", "none", 64, 4, 128, 0, 0, 0.0)
        self.run = self.runner.run
        self.compiled: Future[None] = Future()

    def compile(self, asked: StructuredOutputsParams) -> Future[None]:
        if asked.regex is None:
            raise UsageError("no tokenizer")
        return self.compiled


class Turns:
    """Stands where the engine's links are: what clients send in each turn of the loop, and what they got."""

    def __init__(self, messages: list, after_idle) -> None:
        self.messages, self.after_idle = messages, after_idle
        self.links = {"me": None}
        self.got: dict[str, list] = {}
        self.woken = 0
        self.reader, self.writer = socketpair()
        self.writer.setblocking(False)
        self.wake_fd = self.writer.fileno()

    def receive(self, timeout_s):
        messages, self.messages = self.messages, []
        if not messages and timeout_s != 0:
            messages = self.after_idle(self.got) or [Shutdown(drain=True)]
        return [("me", message) for message in messages]

    def wake(self):
        self.woken += 1

    def send(self, client_id, message):
        for event in message.events:
            self.got.setdefault(event.request_id, []).append(event)

    def paused(self):
        return frozenset()

    def departed(self):
        return []

    def next_sequence(self, client_id):
        return 1


def ask(name, **fields):
    outputs = StructuredOutputsParams(**fields) if fields else None
    sampling = SamplingParams(max_tokens=5, ignore_eos=not fields, seed=1, structured_outputs=outputs)
    return AddRequest(Request(request_id=name, prompt_token_ids=[3, 4, 5], sampling=sampling))


def run(executor, messages, after_idle):
    turns = Turns(messages, after_idle)
    engine = Engine(CONFIG, turns, executor, VirtualClock())
    before = signal.getsignal(signal.SIGTERM)
    try:
        engine.run()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
        turns.reader.close()
        turns.writer.close()
    engine.scheduler.check_integrity()
    return turns


def test_the_others_run_and_then_it_does():
    executor = SlowCompiler()
    seen = []

    def idle(got):
        seen.append({name: events[-1].finish_reason for name, events in got.items()})
        if not executor.compiled.done():
            executor.compiled.set_result(None)
            return [Abort("unknown")]
        return None

    turns = run(executor, [ask("slow", regex="a"), ask("fast"), ask("other")], idle)
    assert seen[0] == {"fast": "length", "other": "length"}
    assert turns.woken == 1
    assert {name: events[-1].finish_reason for name, events in turns.got.items()} == dict.fromkeys(
        ("slow", "fast", "other"), "length"
    )


def test_it_can_be_aborted_meanwhile():
    turns = run(SlowCompiler(), [ask("slow", regex="a")], lambda got: None if got else [Abort("slow")])
    assert [(e.finish_reason, e.token_ids) for e in turns.got["slow"]] == [("abort", [])]


@pytest.mark.parametrize("fields", [{"json_object": True}])
def test_an_engine_that_cannot_compile_says_so(fields):
    turns = run(SlowCompiler(), [ask("it", **fields), ask("other")], lambda got: None)
    (event,) = turns.got["it"]
    assert event.error["cause"] == "no tokenizer"
    assert turns.got["other"][-1].finish_reason == "length"
