"""The engine's loop over thousands of requests on the device that computes nothing, in virtual time.

Clients ask at random times for random things, abort, leave, and pause; queues overflow, deadlines pass, blocks run out.
Every choice ends exactly once, with the tokens that it would have had alone, and what is over leaves nothing behind.
"""

from __future__ import annotations

import gc
import json
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from socket import socketpair

import psutil
import pytest

from octavo.clock import VirtualClock
from octavo.config import EngineArgs, resolve
from octavo.engine.core import Engine
from octavo.engine.executor import RankExecutor
from octavo.engine.messages import Abort, AddRequest, Outputs, Shutdown, decode_from_engine, encode
from octavo.engine.noise import noise_key
from octavo.engine.types import Request, SamplingParams
from octavo.models.checkpoint import open_checkpoint
from octavo.models.simulated import POSITION_MIX, TOKEN_MIX
from tests.matrix import FULL, SEED

COUNT = 10_000 if FULL else 1_500
VOCAB, EOS, CONTEXT = 200, 2, 1024
CLIENTS = ("a", "b", "c")
MOST_GROWTH = 6 << 20
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": EOS,
}  # fmt: skip


def next_token(tokens: list[int], sampling: SamplingParams, choice: int) -> int:
    """What the simulated device makes up (`backends.sim`)."""
    mixed = tokens[-1] * TOKEN_MIX + (len(tokens) - 1) * POSITION_MIX
    if not sampling.greedy:
        mixed ^= noise_key(sampling.seed, choice, len(tokens))
    mixed &= (1 << 64) - 1
    return ((mixed - (1 << 64) if mixed >> 63 else mixed) >> 17) % VOCAB


def answer(request: Request, choice: int) -> list[int]:
    tokens, sampling = list(request.prompt_token_ids), request.sampling
    for _ in range(min(sampling.max_tokens, CONTEXT - len(tokens))):
        tokens.append(next_token(tokens, sampling, choice))
        if tokens[-1] == EOS and not sampling.ignore_eos:
            break
    return tokens[len(request.prompt_token_ids) :]


@dataclass
class Open:
    request: Request
    aborted: set[int] = field(default_factory=set)
    got: dict[int, list[int]] = field(default_factory=dict)


class Clients:
    """Stands where the engine's links are: what `receive` hands out and `send` takes in are the clients' doing."""

    def __init__(self, rng: random.Random, clock: VirtualClock, policy: str) -> None:
        self.rng, self.clock, self.policy = rng, clock, policy
        self.links: dict[str, None] = {}
        self.engine: Engine
        self.open: dict[tuple[str, str], Open] = {}
        self.ends: Counter[str] = Counter()
        self.turns = self.asked = self.sequence = 0
        self.next_arrival = 0.0
        self.prefixes = [self.tokens(rng.randint(20, 400)) for _ in range(12)]
        self.sizes: list[tuple[int, int]] = []
        """(resident bytes, live objects) after a third of the requests, and at the end"""
        self.reader, self.writer = socketpair()
        self.writer.setblocking(False)
        self.wake_fd = self.writer.fileno()

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(count)]

    def receive(self, timeout_s: float | None) -> list:
        self.turns += 1
        if self.turns % 100 == 0:
            self.engine.scheduler.check_integrity()
        if self.asked == COUNT and not self.open:
            return [(CLIENTS[0], Shutdown(drain=True))]
        if timeout_s != 0 and not self.engine.scheduler.has_work:
            self.clock.sleep(max(0.0, self.next_arrival - self.clock.time()))
        messages = []
        while self.asked < COUNT and self.clock.time() >= self.next_arrival:
            messages.append(self.ask())
        if self.open and self.rng.random() < 0.05:
            messages.append(self.abort())
        if not self.sizes and self.asked >= COUNT // 3:
            self.measure()
        return messages

    def ask(self):
        rng, client, name = self.rng, self.rng.choice(CLIENTS), f"r{self.asked}"
        self.asked += 1
        self.links[client] = None
        self.next_arrival += rng.expovariate(300) if self.asked % 300 else 4.0
        greedy = rng.random() < 0.4
        sampling = SamplingParams(
            n=1 if greedy or rng.random() < 0.8 else rng.randint(2, 4), temperature=0.0 if greedy else 0.9,
            seed=rng.randrange(1 << 40), max_tokens=rng.choice([1, 4, 16, 40, 120]), ignore_eos=rng.random() < 0.5,
            repetition_penalty=rng.choice([1.0, 1.2]), presence_penalty=rng.choice([0.0, 0.5]),
        )  # fmt: skip
        prompt = [*rng.choice([[], rng.choice(self.prefixes)]), *self.tokens(rng.randint(1, 60))]
        request = Request(
            request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_time=self.clock.time(),
            priority=rng.choice([0, 0, 1, 2]) if self.policy == "priority" else 0,
            deadline=self.clock.time() + rng.uniform(0.05, 3) if rng.random() < 0.1 else None,
            cache_salt=rng.choice([None, None, "x"]),
        )  # fmt: skip
        self.open[client, name] = Open(request, got={choice: [] for choice in range(sampling.n)})
        return client, AddRequest(request)

    def abort(self):
        (client, name), asked = self.rng.choice(list(self.open.items()))
        some = self.rng.choice([None, [self.rng.randrange(asked.request.sampling.n)]])
        asked.aborted.update(range(asked.request.sampling.n) if some is None else some)
        return client, Abort(name, some)

    def departed(self) -> list[str]:
        """Now and then a client leaves; nobody hears of what it asked for. It comes back with new requests."""
        gone = [self.rng.choice(CLIENTS)] if self.rng.random() < 0.2 else []
        for client in gone:
            self.links.pop(client, None)
        for key in [key for key in self.open if key[0] in gone]:
            self.ends["departed"] += len(self.open.pop(key).got)
        return gone

    def paused(self) -> frozenset[str]:
        return frozenset(CLIENTS[:1] if self.turns // 40 % 8 == 0 and self.asked < COUNT else ())

    def next_sequence(self, client_id: str) -> int:
        self.sequence += 1
        return self.sequence

    def send(self, client_id: str, message: Outputs) -> None:
        for event in decode_from_engine(encode(message)).events:
            asked = self.open[client_id, event.request_id]
            got = asked.got[event.choice]
            got += event.token_ids
            if event.finish_reason is not None:
                self.ends[event.finish_reason] += 1
                self.check_end(asked, event, got)
                del asked.got[event.choice]
                if not asked.got:
                    del self.open[client_id, event.request_id]

    def check_end(self, asked: Open, event, got: list[int]) -> None:
        expected = answer(asked.request, event.choice)
        say = f"OCTAVO_SEED={SEED}, {asked.request}"
        assert got == expected[: len(got)], say
        if event.finish_reason in ("stop", "length"):
            assert len(got) == len(expected), say
        elif event.finish_reason == "abort":
            assert event.choice in asked.aborted or asked.request.deadline is not None, say
        else:
            assert "waiting" in event.error["cause"] and not got, (say, event.error)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()

    def measure(self) -> None:
        gc.collect()
        self.sizes.append((psutil.Process().memory_info().rss, len(gc.get_objects())))


@pytest.mark.parametrize(("policy", "overlapped"), [("fcfs", True), ("priority", False)])
def test_every_choice_ends_once_with_its_own_tokens(tmp_path, policy, overlapped):
    rng, clock = random.Random(f"{SEED}/{policy}/{overlapped}"), VirtualClock()
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    args = EngineArgs(
        str(tmp_path), device="sim", max_num_seqs=48, max_num_batched_tokens=512, block_size=16,
        num_gpu_blocks_override=400, scheduling_policy=policy, async_scheduling=overlapped,
        max_num_queued_reqs=40, long_prefill_token_threshold=rng.choice([0, 100]),
    )  # fmt: skip
    config = resolve(args, open_checkpoint(tmp_path, weights=False).facts())
    executor = RankExecutor(config, str(tmp_path), lambda *_: None)
    executor.worker.device.clock = clock
    clients = Clients(rng, clock, policy)
    clients.engine = engine = Engine(config, clients, executor, clock)
    before = signal.getsignal(signal.SIGTERM)
    try:
        engine.run()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
        clients.close()
    clients.measure()
    engine.scheduler.check_integrity()
    stats = engine.scheduler.snapshot()
    assert not clients.open and not engine.scheduler.has_work
    assert all(clients.ends[end] > 0 for end in ("stop", "length", "abort", "error", "departed")), clients.ends
    assert stats.preemptions > 0 and stats.prefix_hits > 0, stats
    (bytes_then, objects_then), (bytes_now, objects_now) = clients.sizes
    assert bytes_now - bytes_then < MOST_GROWTH, f"OCTAVO_SEED={SEED}: {bytes_then} bytes, then {bytes_now}"
    assert objects_now < objects_then, f"OCTAVO_SEED={SEED}: more objects when all is over than in the middle"
