"""The product's promise: what runs beside a request changes not one bit of its tokens and logprobs.

SmolLM2 on the kernels, in each precision they have: every request alone, and then again in a full batch, with a warm
prefix cache, cut into chunks, preempted, and on other numbers of threads. A sample of requests by default, all 200 with
OCTAVO_FULL=1. The kernels have no captured form of a step; one that comes inherits these tests.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest

from octavo.backends.cpu import lib
from octavo.config import EngineArgs, resolve
from octavo.engine.plan import StepPlan, StepResult, fill_in
from octavo.engine.scheduler import Scheduler
from octavo.engine.types import Request, SamplingParams, StructuredOutputsParams, TokenEvent
from octavo.engine.worker import Prepare, Worker
from octavo.models.checkpoint import open_checkpoint
from tests.matrix import FULL, SEED, sample
from tests.real_models import path_of
from tests.schemas import random_schema

RNG = random.Random(f"{SEED}/invariance")
COUNT = 200 if FULL else 12
VOCAB, PAGE, LONGEST, SEQS = 49152, 16, 1024, 64
PRECISIONS = ("auto", "int8", "fp8_e4m3", "fp8_e5m2")
SAY_SEED = f"OCTAVO_SEED={SEED}"

Answers = dict[str, list[tuple[list[int], object, object]]]


def some_requests() -> list[Request]:
    """Mixed lengths, greedy and sampled, some with a beginning in common, some within a schema or a regex."""
    common = [RNG.randrange(VOCAB) for _ in range(90)]
    made = []
    for number in range(COUNT):
        size = RNG.choice((1, 15, 16, 17, RNG.randint(2, 60), RNG.randint(60, 300)))
        prompt = (common if RNG.random() < 0.3 else []) + [RNG.randrange(VOCAB) for _ in range(size)]
        form = RNG.choice((None, None, some_form()))
        sampling = SamplingParams(
            temperature=RNG.choice((0.0, 0.7, 1.3)), top_p=RNG.choice((1.0, 0.9)), top_k=RNG.choice((0, 40)),
            repetition_penalty=RNG.choice((1.0, 1.2)), frequency_penalty=RNG.choice((0.0, 0.3)), seed=number,
            max_tokens=RNG.randint(5, 24), ignore_eos=form is None, logprobs=2,
            structured_outputs=None if form is None else StructuredOutputsParams(**form),
            prompt_logprobs=1 if RNG.random() < 0.1 else None,
        )  # fmt: skip
        made.append(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    return made


def some_form() -> dict[str, str]:
    """One that asks for more than any answer has room for, as all must live long enough to be preempted twice."""
    if RNG.random() < 0.5:
        items = random_schema(RNG, 1)
        definitions = items.pop("$defs", {})
        return {"json": json.dumps({"type": "array", "items": items, "minItems": 200, "$defs": definitions})}
    return {"regex": f"(?:[{RNG.choice(('a-m', 'A-Za-z', '0-9', 'é-ü'))}]{{1,{RNG.randint(1, 9)}}}[ ,.]){{300}}"}


class Lab:
    """The model, loaded once, and engines around it."""

    def __init__(self, kv_cache_dtype: str) -> None:
        assert lib.available(), "the promise is that of the kernels, which are not built here"
        path = path_of("smollm2")
        checkpoint = open_checkpoint(path)
        args = EngineArgs(
            "smollm2", device="cpu", threads=2, kv_cache_dtype=kv_cache_dtype, max_model_len=LONGEST, max_num_seqs=SEQS,
            block_size=PAGE,
        )  # fmt: skip
        self.worker = Worker(replace(resolve(args, checkpoint.facts()), tokenizer=str(path)), 0, "")

    def run(
        self, requests: list[Request], *, blocks: int = 2000, chunk: int = 0, caching: bool = False, rounds: int = 1,
        disturb: Callable[[Scheduler], None] | None = None, overlapped: bool = False, host_slots: int = 0,
    ) -> tuple[Answers, Scheduler]:  # fmt: skip
        """The answers of the last round."""
        self.worker.prepare(Prepare(PAGE, (blocks,), LONGEST, (host_slots,) if host_slots else ()))
        scheduler = Scheduler(
            self.worker.layout, max_num_seqs=SEQS, max_num_batched_tokens=2048, max_model_len=LONGEST, vocab_size=VOCAB,
            eos_token_ids=self.worker.config.eos_token_ids, long_prefill_token_threshold=chunk,
            enable_prefix_caching=caching,
            host=self.worker.store if host_slots else None,
        )  # fmt: skip
        scheduler.tiers.speed.host.note(1e15, 1e-9)  # moving costs nothing, so that a sequence is swapped if it can be
        for _ in range(rounds):
            answers = self._round(scheduler, requests, disturb, overlapped)
        return answers, scheduler

    def _round(
        self, scheduler: Scheduler, requests: list[Request], disturb: Callable[[Scheduler], None] | None,
        overlapped: bool,
    ) -> Answers:  # fmt: skip
        events: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        for request in requests:
            scheduler.add(request, 0.0)
        before: tuple[StepPlan, StepResult] | None = None
        while scheduler.has_work or before is not None:
            if disturb is not None:
                disturb(scheduler)
            plan, done = scheduler.plan(0.0), before
            if done is not None:
                fill_in(plan, *done)
            before = (plan, self.worker.run(plan)) if plan.chunks else None
            if not overlapped:
                done, before = before, None
            for _, event in scheduler.commit(*done) if done is not None else ():
                events[event.request_id].append(event)
            scheduler.check_integrity()
        return {name: [(e.token_ids, e.logprobs, e.prompt_logprobs) for e in found] for name, found in events.items()}


@pytest.fixture(scope="module", params=sample(PRECISIONS, 2))
def lab(request):
    return Lab(request.param)


@pytest.fixture(scope="module")
def requests():
    return some_requests()


@pytest.fixture(scope="module")
def alone(lab, requests) -> Answers:
    answers: Answers = {}
    for one in requests:
        answers |= lab.run([one])[0]
    return answers


def same(alone: Answers, answers: Answers, how: str) -> None:
    different = [name for name in alone if answers[name] != alone[name]]
    assert not different, f"requests {different} differ {how}, {SAY_SEED}"


def test_in_a_full_batch(lab, requests, alone):
    same(alone, lab.run(requests)[0], "in a batch")


def test_in_the_overlapped_loop(lab, requests, alone):
    same(alone, lab.run(requests, blocks=80, caching=True, overlapped=True)[0], "in the overlapped loop")


def test_with_a_warm_prefix_cache(lab, requests, alone):
    answers, scheduler = lab.run(requests, caching=True, rounds=2)
    assert scheduler.stats.prefix_hits > 0
    same(alone, answers, "with a warm prefix cache")


@pytest.mark.parametrize("chunk", [1, 16, 128, 2048])
def test_in_chunks(lab, requests, alone, chunk):
    same(alone, lab.run(requests, chunk=chunk)[0], f"in chunks of {chunk}")


@pytest.mark.parametrize("host_slots", [0, 4000], ids=["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
def test_preempted_twice_or_more(lab, requests, alone, caching, host_slots):
    preempted: Counter[str] = Counter()

    def twice(scheduler: Scheduler) -> None:
        for sequence in list(scheduler.running):
            name, length = sequence.request.request_id, len(sequence.output_token_ids)
            if length >= 1 + 2 * preempted[name] and preempted[name] < 2:
                scheduler.preempt(sequence)
                preempted[name] += 1

    answers, scheduler = lab.run(requests, blocks=80, caching=caching, disturb=twice, host_slots=host_slots)
    assert all(preempted[r.request_id] >= 2 for r in requests), SAY_SEED
    assert scheduler.stats.preemptions >= 2 * len(requests)
    assert (scheduler.stats.preemptions_swapped > len(requests)) == bool(host_slots)
    same(alone, answers, "preempted")


@pytest.mark.parametrize("threads", [1, 3])
def test_on_other_numbers_of_threads(lab, requests, alone, threads):
    library = lib.load()
    assert library is not None
    before = library.threads
    library.set_threads(threads)
    try:
        same(alone, lab.run(requests)[0], f"on {threads} threads")
    finally:
        library.set_threads(before)
