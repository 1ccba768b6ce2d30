"""All parts of the engine at once: whatever is switched on and whatever happens to others, a request's answer is that
which it has alone in a plain engine, bit by bit, and nothing is left over at the end.

A few random engines by default, hundreds with OCTAVO_FULL=1. `OCTAVO_SEED` and the number in a test's name repeat one.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict

import msgspec
import pytest

from octavo.config import Speculation
from octavo.engine.block_folder import BlockFolder
from octavo.engine.disk_tier import DiskTier
from octavo.engine.grammar import Compiler
from octavo.engine.plan import fill_in
from octavo.engine.types import RepetitionDetectionParams, StructuredOutputsParams
from octavo.errors import OctavoError
from tests.engine.test_adapters import AdaptedEngine
from tests.engine.tiny import VOCAB, request, tokens_of, write_llama
from tests.engine.tiny_words import EOS, tiny_tokenizer
from tests.lora_fixtures import MLP, write_adapter
from tests.matrix import FULL, SEED

ROUNDS = 400 if FULL else 12
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PAGE = 16
GRAMMARS = (
    {"regex": "[a-z]{4}(=[0-9]{3},[a-d]{2}){1,5}"}, {"choice": ("yes, yes", "no")},
    {"json": '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}'},
    {"grammar": 'start: item ("," item){0,3}\nitem: "<" NAME ">"\nNAME: /[a-z]{1,3}/'},
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("small"), SEED + 1, **SMALL)


@pytest.fixture(scope="module")
def adapters(llama, mistral, tmp_path_factory):
    """By model: paths by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        model: {
            "all": str(write_adapter(folder / model.name / "all", model, SEED, rank=8)),
            "mlp": str(write_adapter(folder / model.name / "mlp", model, SEED + 1, targets=MLP, rank=3)),
        }
        for model in (llama, mistral)
    }


@pytest.fixture(scope="module")
def compiler():
    return Compiler(lambda: tiny_tokenizer(random.Random(SEED)), VOCAB, (EOS,))


@pytest.fixture(scope="module")
def plain(adapters, compiler):
    """The plain engine of a model and a format of the KV cache."""
    made = {}

    def engine(model, kv_cache_dtype):
        key = model, kv_cache_dtype
        if key not in made:
            made[key] = adapted(model, adapters[model], compiler, kv_cache_dtype=kv_cache_dtype,
                                enable_prefix_caching=False, budget=256)  # fmt: skip
        return made[key]

    return engine


def adapted(model, paths, compiler, **settings):
    engine = AdaptedEngine(model, device_name="cpu", page_size=PAGE, compiler=compiler, **settings)
    for name, path in paths.items():
        engine.adapters.load(name, path)
    return engine


def random_settings(rng, model, small, llama):
    """An engine with any of what it can have."""
    speculation = None
    length = rng.randint(1, 6)
    match rng.choice((None, None, "ngram", "draft")):
        case "ngram":
            speculation = Speculation("ngram", length, prompt_lookup_min=1, prompt_lookup_max=3)
        case "draft":
            draft = rng.choice((small, llama)) if model == llama else model
            speculation = Speculation("draft_model", length, model=str(draft))
    caching = rng.random() < 0.7
    return {
        "blocks": rng.choice((17, 18, 24, 40, 300)), "budget": rng.choice((16, 33, 64, 256)),
        "seqs": rng.choice((1, 3, 8, 16)), "kv_cache_dtype": rng.choice(("auto", "auto", "int8", "fp8", "fp8_e5m2")),
        "speculation": speculation, "host_slots": rng.choice((0, 7, 60, 300)), "enable_prefix_caching": caching,
        "long_prefill_token_threshold": rng.choice((0, 0, 5, 16)), "policy": rng.choice(("fcfs", "priority")),
    }  # fmt: skip


def random_sampling(rng, said):
    """Any parameters that go together. `said`: tokens that answers are likely to hold."""
    fields = {"seed": rng.randrange(1 << 30), "max_tokens": rng.randint(1, 40), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.15:
        fields |= {"n": rng.randint(1, 4), "use_beam_search": True, "temperature": 0.0, "max_tokens": rng.randint(1, 9)}
        return fields | {"logprobs": rng.choice((None, 0, 3)), "length_penalty": rng.choice((1.0, 0.5))}
    fields["temperature"] = rng.choice((0.0, 0.3, 0.9, 1.4))
    if fields["temperature"]:
        fields |= {"n": rng.choice((1, 1, 2, 4)), "top_p": rng.choice((1.0, 0.9)), "top_k": rng.choice((0, 10))}
        fields["min_p"] = rng.choice((0.0, 0.02))
    options = [
        {"repetition_penalty": 1.3}, {"frequency_penalty": rng.choice((0.5, -1.0))}, {"presence_penalty": 0.4},
        {"logprobs": rng.choice((0, 3))}, {"logit_bias": {said[0]: 3.0, said[1]: -100.0}},
        {"bad_word_ids": ((said[2],), (said[3], said[4]))}, {"stop_token_ids": (said[5], said[6])},
        {"min_tokens": rng.randint(0, fields["max_tokens"])},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=2)},
    ]  # fmt: skip
    for option in rng.sample(options, rng.randint(0, 5)):
        fields |= option
    kind = rng.choice(("grammar", "thinking", "allowed", "prompt", None, None, None))
    if kind == "grammar":
        fields["structured_outputs"] = StructuredOutputsParams(**rng.choice(GRAMMARS))
        fields |= {"ignore_eos": False, "min_tokens": 0, "bad_word_ids": (), "stop_token_ids": ()}
    elif kind == "thinking":
        fields |= {"thinking_token_budget": rng.randint(0, 6), "thinking_marks": (said[7], 50)}
    elif kind == "allowed":
        fields["allowed_token_ids"] = tuple(range(2, 60))
    elif kind == "prompt":
        fields["prompt_logprobs"] = rng.choice((0, 2))
    return fields


def random_requests(rng, by_priority):
    commons = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(17, 90))] for _ in range(2)]
    said = [rng.randrange(3, VOCAB) for _ in range(8)]
    made = []
    for number in range(rng.randint(2, 9)):
        fields = random_sampling(rng, said)
        piece = [rng.choice((rng.randrange(3, VOCAB), *said)) for _ in range(rng.randint(1, 12))]
        prompt = (rng.choice((*commons, [], [])) + piece * rng.choice((1, 1, 4)))[:150]
        output = None
        if rng.random() < 0.15 and not (fields.get("use_beam_search") or fields.get("structured_outputs")):
            output = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 20))] for _ in range(fields.get("n", 1))]
        one = request(str(number), prompt, output=output, **fields)
        made.append(msgspec.structs.replace(
            one, client_id=rng.choice("ab"), adapter=rng.choice((None, None, "all", "mlp")),
            cache_salt=rng.choice((None, None, "a", "b")), priority=rng.randint(-2, 2) if by_priority else 0,
        ))  # fmt: skip
    return made


class Driver:
    """Runs requests as the core does, plainly or with plans ahead, while others come, leave and fail."""

    def __init__(self, rng, engine, *, overlapped=False, trouble=False):
        self.rng, self.engine, self.overlapped, self.trouble = rng, engine, overlapped, trouble
        self.scheduler = engine.scheduler
        self.events = defaultdict(lambda: defaultdict(list))
        self.disturbed = set()
        self.fails = 0
        self.blame = None
        model = engine.runner._model
        self.forward = type(model).forward.__get__(model)
        model.forward = self._forward

    def _forward(self, *given):
        if self.trouble and self.rng.random() < 0.02 and self.fails < 4:
            self.fails += 1
            raise RuntimeError("a step fails for once")
        return self.forward(*given)

    def note(self, events):
        for _, event in events:
            self.events[event.request_id][event.choice].append(event)

    def run(self, requests):
        waiting = list(reversed(requests))
        before = None
        while waiting or self.scheduler.has_work or before is not None:
            while waiting and (self.rng.random() < 0.4 or not self.scheduler.has_work):
                self.note(self.scheduler.add(waiting.pop(), 0.0))
            before = self._step(before)
            if self.trouble:
                self._disturb()
            self.scheduler.check_integrity()
        return {name: [content(choices[i]) for i in sorted(choices)] for name, choices in self.events.items()}

    def _step(self, before):
        plan = self.scheduler.plan(0.0)
        if before is not None:
            done, result = before
            if isinstance(result, Exception):
                self._failed(done)
                return None
            fill_in(plan, done, result)
        now = None
        if plan.chunks:
            try:
                now = plan, self.engine.runner.run(plan)
            except RuntimeError as err:
                now = plan, err
        elif before is None:  # all wait for the disk, or may not run
            self.scheduler.paused_clients, self.scheduler.held_back = frozenset(), ()
            time.sleep(0.0005)
        if before is None:
            self.engine.adapters.sweep(self.scheduler.adapters_in_use)
        if before is not None:
            self._done(*before)
        if self.overlapped or now is None:
            return now
        if isinstance(now[1], Exception):
            self._failed(plan)
        else:
            self._done(*now)
        return None

    def _done(self, plan, result):
        self.note(self.scheduler.commit(plan, result))
        if self.blame is not None:
            self._end_suspect()

    def _end_suspect(self):
        events, self.blame = self.scheduler.end_suspect(self.blame), None
        self.disturbed |= {event.request_id for _, event in events}
        self.note(events)

    def _failed(self, plan):
        error = OctavoError("a step failed")
        if self.scheduler.set_aside_newest(plan):
            self.blame = error
            return
        events = self.scheduler.fail(plan, error)
        self.disturbed |= {event.request_id for _, event in events}
        self.note(events)

    def _disturb(self):
        everyone = self.scheduler.running + self.scheduler.waiting
        if everyone and self.rng.random() < 0.03:
            one = self.rng.choice(everyone).request
            choices = self.rng.choice((None, [self.rng.randrange(one.sampling.n)]))
            self.disturbed.add(one.request_id)
            self.note(self.scheduler.abort(one.client_id, one.request_id, choices))
        if self.scheduler.running and self.rng.random() < 0.1:
            self.scheduler.preempt(self.rng.choice(self.scheduler.running))
        if self.rng.random() < 0.05:
            self.scheduler.paused_clients = frozenset(self.rng.choice(("", "", "", "a", "b")))
        if self.rng.random() < 0.05:
            everyone = [(s.request.client_id, s.request.request_id) for s in self.scheduler.waiting]
            self.scheduler.held_back = set(self.rng.sample(everyone, min(len(everyone), self.rng.randint(0, 2))))
        if self.rng.random() < 0.02:
            name = self.rng.choice(("all", "mlp"))
            if len(self.engine.adapters.leaving) < 2:
                self.engine.adapters.load(name, self.engine.adapters.loaded[name].path, in_place=True)


def content(events):
    logprobs = [one for event in events for one in event.logprobs or ()]
    prompt = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    last = events[-1]
    assert all(event.finish_reason is None for event in events[:-1]) and last.finish_reason is not None
    return tokens_of(events), logprobs, prompt, last.finish_reason, last.stop_reason, last.error


@pytest.mark.parametrize("number", range(ROUNDS))
def test_everything_at_once_answers_as_alone(number, llama, mistral, small, adapters, compiler, plain, tmp_path):
    rng = random.Random(f"{SEED}/combination/{number}")
    model = rng.choice((llama, llama, mistral))
    settings = random_settings(rng, model, small, llama)
    overlapped = settings["speculation"] is None and rng.random() < 0.6
    disk_bytes = rng.choice((1 << 18, 1 << 28)) if settings["host_slots"] and rng.random() < 0.6 else 0
    how = f"OCTAVO_SEED={SEED}, number {number}, {overlapped=}, {disk_bytes=}, {settings}"
    asked = random_requests(rng, settings["policy"] == "priority")
    expected = {}
    for one in asked:
        alone = Driver(rng, plain(model, settings["kv_cache_dtype"]))
        expected |= alone.run([msgspec.structs.replace(one, priority=0)])
    cheap = rng.random() < 0.7
    for again in range(2):
        if again == 0 or disk_bytes:  # with a disk the engine starts again
            disk = open_disk(tmp_path, disk_bytes)
            engine = adapted(model, adapters[model], compiler, disk=disk, **settings)
        for tier in (engine.scheduler.tiers.speed.host, engine.scheduler.tiers.speed.disk) if cheap else ():
            tier.note(1e15, 1e-9)  # then what can be moved is never computed
        rng_here = random.Random(f"{SEED}/{number}/{again}")
        driver = Driver(rng_here, engine, overlapped=overlapped, trouble=rng.random() < 0.7)
        got = driver.run(asked)
        assert got.keys() == expected.keys()
        for name, choices in expected.items():
            assert len(got[name]) == len(choices)
            if name not in driver.disturbed:
                assert got[name] == choices, f"{how}, {again=}: {asked[int(name)]}"
        assert engine.scheduler.snapshot().blocks_used == 0 and not engine.scheduler._in_flight, how
        if disk is not None:
            disk.close(5)


def open_disk(path, disk_bytes):
    return DiskTier(BlockFolder(str(path / "kv"), disk_bytes, "f"), lambda: None) if disk_bytes else None
