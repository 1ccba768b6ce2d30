"""The scheduler with a runner that has memory but no arithmetic."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.backends.kv import FullAttention, SlidingWindow
from octavo.engine.pages import KVLayout
from octavo.engine.plan import StepPlan, StepResult, fill_in
from octavo.engine.roster import Events
from octavo.engine.scheduler import Scheduler
from octavo.engine.types import Request, SamplingParams, TokenEvent
from octavo.errors import InvalidRequest, OctavoError, Overloaded
from tests.null.memory import NullRunner, continuation

VOCAB = 50
FULL, WINDOW = FullAttention(1, 1), SlidingWindow(1, 1, 5)


def build(
    blocks=(16,),
    specs=(FULL,),
    page_size=4,
    seqs=4,
    budget=8,
    length=40,
    eos=(),
    seed=0,
    guesses=0,
    slots=0,
    **settings,
):
    layout = KVLayout(page_size, specs, blocks)
    runner = NullRunner(layout, VOCAB, seqs, guesses, slots)
    scheduler = Scheduler(
        layout, max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=length, vocab_size=VOCAB,
        eos_token_ids=eos, seed=seed, host=runner, **{"policy": "priority", **settings},
    )  # fmt: skip
    return scheduler, runner


def request(name="r", prompt=(1, 2, 3), client="c", **fields):
    extra = {k: fields.pop(k) for k in ("priority", "deadline", "output_token_ids") if k in fields}
    sampling = SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **fields})
    return Request(request_id=name, prompt_token_ids=list(prompt), sampling=sampling, client_id=client, **extra)


def step(scheduler, runner, now=0.0) -> Events:
    plan = scheduler.plan(now)
    assert plan.num_tokens <= scheduler.max_num_batched_tokens
    scheduler.check_integrity()
    events = scheduler.commit(plan, runner.run(plan)) if plan.chunks else []
    scheduler.check_integrity()
    return events


class Overlapped:
    """Steps as the overlapped loop makes them: the next plan is made before this one's tokens are known."""

    def __init__(self, scheduler: Scheduler, runner: NullRunner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.running: tuple[StepPlan, StepResult] | None = None

    def step(self) -> Events:
        plan, before = self.scheduler.plan(0.0), self.running
        self.scheduler.check_integrity()
        self.running = None
        if plan.chunks:
            if before is not None:
                fill_in(plan, *before)
            self.running = (plan, self.runner.run(plan))
        events = self.scheduler.commit(*before) if before is not None else []
        self.scheduler.check_integrity()
        return events


def finish(scheduler, runner, limit=2000) -> dict[tuple[str, int], list[TokenEvent]]:
    answers = defaultdict(list)
    for _ in range(limit):
        if not scheduler.has_work:
            return answers
        for _, event in step(scheduler, runner):
            answers[event.request_id, event.choice].append(event)
    raise AssertionError("the scheduler does not come to an end")


def test_steps_are_counted_by_their_tokens_also_those_of_prefill_only():
    scheduler, runner = build(budget=9, length=40)
    scheduler.add(request(prompt=range(20)), 0.0)
    finish(scheduler, runner)
    stats = scheduler.snapshot()
    assert stats.steps_by_tokens == [4, 1, 2, *[0] * 11], "four of 1 token, one of 2, and two of 9"
    assert (stats.steps, stats.step_tokens) == (7, 24)


def tokens_of(events):
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason is not None
    return [t for e in events for t in e.token_ids]


def test_answers_are_the_models():
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    scheduler, runner = build(blocks=(12,))
    wanted = {}
    for i in range(12):
        first = i < 4  # these start together and outgrow the pool
        prompt = [rng.randrange(VOCAB) for _ in range(1 if first else rng.randint(1, 30))]
        count = 30 if first else rng.randint(1, 12)
        scheduler.add(request(str(i), prompt, max_tokens=count), 0.0)
        wanted[str(i), 0] = continuation(prompt, min(count, 40 - len(prompt)), VOCAB)
    answers = finish(scheduler, runner)
    assert {k: tokens_of(v) for k, v in answers.items()} == wanted, f"seed {seed}"
    assert all(v[-1].finish_reason == "length" for v in answers.values())
    assert scheduler.blocks.num_used == 0
    assert scheduler.stats.preemptions > 0


def test_preemption_takes_the_youngest_and_lowest_priority_first():
    scheduler, runner = build(blocks=(6,), budget=24, seqs=4)
    for name, priority in (("old", 0), ("low", 1), ("young", 0)):
        scheduler.add(request(name, range(7), max_tokens=8, priority=priority), 0.0)
    preempted, ended = [], []
    while scheduler.has_work:
        before = {s.request.request_id for s in scheduler.running}
        ended += [e.request_id for _, e in step(scheduler, runner) if e.finish_reason]
        preempted += [s.request.request_id for s in scheduler.waiting if s.request.request_id in before]
    assert preempted[:2] == ["low", "young"], "two of the three have room for their last block"
    assert "old" not in preempted
    assert ended == ["old", "young", "low"]


def test_stop_reasons():
    answer = continuation([1, 2, 3], 8, VOCAB)
    scheduler, runner = build(eos=(answer[2],))
    third, sixth = answer.index(answer[2]) + 1, answer.index(answer[5]) + 1
    scheduler.add(request("eos", max_tokens=8, ignore_eos=False), 0.0)
    scheduler.add(request("ignored", max_tokens=8), 0.0)
    scheduler.add(request("stop", max_tokens=8, stop_token_ids=(answer[5],)), 0.0)
    scheduler.add(request("long", max_tokens=None), 0.0)
    ends = {k[0]: (tokens_of(v), v[-1].finish_reason, v[-1].stop_reason) for k, v in finish(scheduler, runner).items()}
    assert ends["eos"] == (answer[:third], "stop", None)
    assert ends["ignored"] == (answer, "length", None)
    assert ends["stop"] == (answer[:sixth], "stop", answer[5])
    assert len(ends["long"][0]) == 40 - 3


def test_choices_are_sequences_and_end_one_by_one():
    scheduler, runner = build(budget=9)
    scheduler.add(request("r", n=3, seed=5), 0.0)
    step(scheduler, runner)
    events = scheduler.abort("c", "r", [1])
    assert [(c, e.choice, e.finish_reason) for c, e in events] == [("c", 1, "abort")]
    assert scheduler.abort("c", "r", [1]) == []
    answers = finish(scheduler, runner)
    assert {k: len(tokens_of(v)) for k, v in answers.items()} == {("r", 0): 4, ("r", 2): 5}


def test_carried_tokens_continue_and_complete_answers_end_at_once():
    answer = continuation([1, 2, 3], 5, VOCAB)
    scheduler, runner = build()
    events = scheduler.add(request("r", n=2, seed=1, output_token_ids=[answer[:2], [9, 9, 9, 9, 9]]), 0.0)
    assert [(e.choice, e.finish_reason, e.token_ids) for _, e in events] == [(1, "length", [])]
    assert tokens_of(finish(scheduler, runner)["r", 0]) == answer[2:]


def test_prompt_logprobs_come_whole_across_chunks_and_preemption():
    prompt = list(range(20))
    scheduler, runner = build(blocks=(7,), budget=6, seqs=2)
    scheduler.add(request("first", prompt[:9], max_tokens=12), 0.0)
    scheduler.add(request("second", prompt, max_tokens=3, prompt_logprobs=0), 0.0)
    event = finish(scheduler, runner)["second", 0][0]
    assert event.prompt_logprobs[0] is None
    assert [p.token_ids[0] for p in event.prompt_logprobs[1:]] == prompt[1:]


def test_a_paused_client_waits_and_makes_room():
    scheduler, runner = build(blocks=(10,), budget=40, seqs=1)
    scheduler.add(request("slow", range(20), client="slow", max_tokens=9), 0.0)
    step(scheduler, runner)
    scheduler.paused_clients = frozenset({"slow"})
    assert not scheduler.plan(0.0).chunks
    scheduler.add(request("quick", range(30), client="quick", max_tokens=9), 0.0)
    events = [e for _ in range(9) for _, e in step(scheduler, runner)]
    assert {e.request_id for e in events} == {"quick"}
    assert events[-1].finish_reason == "length"
    assert not step(scheduler, runner)
    scheduler.paused_clients = frozenset()
    assert len(tokens_of(finish(scheduler, runner)["slow", 0])) == 8


def test_refusals_name_the_limit():
    scheduler, _ = build(blocks=(5,), length=40)
    for bad, words in (
        (request(prompt=[]), "empty"),
        (request(prompt=[1, VOCAB]), "vocabulary"),
        (request(prompt=[-1]), "vocabulary"),
        (request(prompt=[1] * 40), "context of 40"),
        (request(prompt=[1] * 15, max_tokens=9), "KV cache"),
        (request(temperature=-1), "temperature"),
        (request(n=2, output_token_ids=[[1]]), "choices"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            scheduler.add(bad, 0.0)
    assert not scheduler.has_work
    scheduler.add(request(prompt=[1] * 12, max_tokens=9), 0.0)
    with pytest.raises(InvalidRequest, match="in use"):
        scheduler.add(request(), 0.0)


def test_the_queue_is_bounded(monkeypatch):
    monkeypatch.setattr("octavo.engine.intake.MAX_WAITING", 3)
    scheduler, _ = build()
    scheduler.add(request("a", n=3), 0.0)
    with pytest.raises(Overloaded):
        scheduler.add(request("b"), 0.0)


def test_deadlines_end_what_nobody_waits_for():
    scheduler, runner = build()
    scheduler.add(request("late", deadline=10.0), 0.0)
    scheduler.add(request("free"), 0.0)
    step(scheduler, runner)
    assert scheduler.expire(9.9) == []
    assert [(e.request_id, e.finish_reason) for _, e in scheduler.expire(10.0)] == [("late", "abort")]
    assert len(scheduler.running) == 1


def test_a_step_that_fails_for_one_goes_on_for_the_others():
    scheduler, runner = build()
    scheduler.add(request("good"), 0.0)
    scheduler.add(request("bad", [4, 5]), 0.0)
    step(scheduler, runner)
    plan = scheduler.plan(0.0)
    bad = next(s.sequence_id for s in scheduler.running if s.request.request_id == "bad")
    events = scheduler.fail(plan, OctavoError("broken"), bad)
    assert [(e.request_id, e.finish_reason, e.error["cause"]) for _, e in events] == [("bad", "error", "broken")]
    scheduler.check_integrity()
    assert sum(len(e.token_ids) for e in finish(scheduler, runner)["good", 0]) == 4


def test_seeds_are_drawn_at_admission():
    def drawn(seed):
        scheduler, _ = build(seed=seed)
        scheduler.add(request("a"), 0.0)
        scheduler.add(request("b", n=2), 0.0)
        return [s.seed for s in scheduler.waiting]

    one, two = drawn(0), drawn(0)
    assert len({*one, *two}) == 4
    assert one[1] == one[2]
    assert drawn(3) == drawn(3) != drawn(4)


def test_a_request_of_better_priority_takes_the_place_of_a_running_one():
    scheduler, runner = build(seqs=2, blocks=(30,), budget=24)
    for name in ("a", "b"):
        scheduler.add(request(name, max_tokens=12, priority=5), 0.0)
    step(scheduler, runner)
    scheduler.add(request("same", max_tokens=2, priority=5), 0.0)
    scheduler.add(request("urgent", max_tokens=2, priority=1), 0.0)
    events = step(scheduler, runner)
    assert {e.request_id for _, e in events} == {"a", "urgent"}, "b came last"
    assert scheduler.stats.preemptions == 1
    answers = finish(scheduler, runner)
    assert tokens_of([e for _, e in events if e.request_id == "urgent"] + answers["urgent", 0])
    wanted = continuation([1, 2, 3], 12, VOCAB)
    assert tokens_of(answers["b", 0]) == wanted[1:], "b goes on where it stopped"


def test_priority_is_refused_first_come_first_served():
    scheduler, _ = build(policy="fcfs")
    with pytest.raises(InvalidRequest, match="priority is 2") as caught:
        scheduler.add(request(priority=2), 0.0)
    assert caught.value.param == "priority"


def test_a_long_prefill_leaves_room_for_others():
    scheduler, runner = build(budget=8, blocks=(30,), long_prefill_token_threshold=3)
    scheduler.add(request("long", range(20)), 0.0)
    scheduler.add(request("short", range(5)), 0.0)
    plan = scheduler.plan(0.0)
    assert [len(c.token_ids) for c in plan.chunks] == [3, 3]
    scheduler.commit(plan, runner.run(plan))
    events = step(scheduler, runner)
    assert [e.request_id for _, e in events] == ["short"]
    finish(scheduler, runner)


def test_blocks_that_a_long_prefill_still_takes_are_not_given_to_others():
    scheduler, runner = build(budget=8, blocks=(6,), long_prefill_token_threshold=3)
    scheduler.add(request("long", range(16), max_tokens=2), 0.0)
    scheduler.add(request("short", range(9), max_tokens=2), 0.0)
    finish(scheduler, runner)
    assert scheduler.stats.preemptions == 0, "5 and 3 blocks do not fit into 6, so that the second waits"


def test_queue_limits_refuse_and_say_when_to_come_back():
    scheduler, runner = build(seqs=1, max_num_queued_reqs=2, max_num_queued_tokens=25)
    scheduler.add(request("a", range(30), max_tokens=2), 0.0)  # more than the limit, but nobody else waits
    with pytest.raises(Overloaded, match="--max-num-queued-tokens"):
        scheduler.add(request("b"), 0.0)
    step(scheduler, runner)
    scheduler.add(request("c", range(10)), 0.0)
    scheduler.add(request("d", range(15)), 0.0)
    with pytest.raises(Overloaded, match=r"2 requests are waiting; limit: 2 \(--max-num-queued-reqs") as caught:
        scheduler.add(request("e"), 0.0)
    assert caught.value.retry_after_s >= 1
    scheduler.abort("c", "d")
    scheduler.add(request("f"), 0.0)
    finish(scheduler, runner)
    assert scheduler.snapshot().rejected == {"max_num_queued_tokens": 1, "max_num_queued_reqs": 1}


def test_retry_after_is_from_the_speed_at_which_prompts_start():
    scheduler, runner = build(seqs=1, blocks=(300,), length=1100, budget=2000, max_num_queued_tokens=3000)
    for second in range(8):  # 1,000 tokens a second
        scheduler.add(request(str(second), [1] * 1000, max_tokens=1), 0.0)
        step(scheduler, runner, now=100.0 + second)
    for name in "abc":
        scheduler.add(request(name, [1] * 1000), 0.0)
    with pytest.raises(Overloaded) as caught:
        scheduler.add(request("e"), 0.0)
    assert caught.value.retry_after_s in (2, 3)


def test_a_step_that_fails_for_no_known_reason_is_tried_without_the_newest_request():
    scheduler, runner = build()
    for name in ("old", "new"):
        scheduler.add(request(name, n=2 if name == "new" else 1, seed=1), 0.0)
    plan = scheduler.plan(0.0)
    assert scheduler.set_aside_newest(plan)
    scheduler.check_integrity()
    again = scheduler.plan(0.0)
    assert [c.sequence_id for c in again.chunks] == [0]
    assert not scheduler.set_aside_newest(again)
    scheduler.commit(again, runner.run(again))
    ended = scheduler.end_suspect(OctavoError("broken"))
    assert [(e.request_id, e.choice, e.finish_reason) for _, e in ended] == [("new", 0, "error"), ("new", 1, "error")]
    assert len(tokens_of(finish(scheduler, runner)["old", 0])) == 4


def test_drafts_cost_no_other_sequence_its_turn_or_its_blocks():
    scheduler, runner = build(guesses=8, blocks=(80,), length=100, budget=12, seqs=6)
    for i in range(6):
        scheduler.add(request(str(i), max_tokens=60), 0.0)
    for _ in range(20):
        step(scheduler, runner)
    assert len(scheduler.running) == 6, "guesses leave waiting ones some of the budget"
    scheduler.add(request("waiting", max_tokens=60), 0.0)
    for _ in range(8):
        plan = scheduler.plan(0.0)
        assert len(plan.chunks) == 6, "each has its turn"
        assert 0 < sum(c.num_drafts for c in plan.chunks) <= 6
        scheduler.commit(plan, runner.run(plan))
    finish(scheduler, runner)


def test_drafts_preempt_nobody():
    """Two long answers fit once two short ones are over, but not the guesses of both before."""
    for guesses in (0, 8):
        scheduler, runner = build(guesses=guesses, blocks=(12,), length=100, budget=80, seqs=4, page_size=2)
        lengths = {"0": 9, "1": 9, "2": 2, "3": 2}
        for name, count in lengths.items():
            scheduler.add(request(name, max_tokens=count), 0.0)
        for (name, _), answer in finish(scheduler, runner).items():
            assert tokens_of(answer) == continuation([1, 2, 3], lengths[name], VOCAB)
        assert scheduler.stats.preemptions == 0
        assert (scheduler.stats.accepted_tokens > 0) == (guesses > 0)


def test_drafts_that_are_right_are_taken_and_counted():
    scheduler, runner = build(guesses=4, blocks=(30,), length=100, budget=20)
    scheduler.add(request(max_tokens=40), 0.0)
    assert tokens_of(finish(scheduler, runner)["r", 0]) == continuation([1, 2, 3], 40, VOCAB)
    stats = scheduler.snapshot()
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert sum(stats.accepted_by_position) == stats.accepted_tokens
    assert stats.steps == 40 - stats.accepted_tokens, "each token comes of a step or of a guess"


class Life(RuleBasedStateMachine):
    """Random adds, aborts, pauses and steps on tiny pools; every choice gets its tokens and exactly one end."""

    @initialize(
        blocks=st.integers(6, 14), page_size=st.sampled_from([1, 2, 4]), seqs=st.integers(1, 5),
        budget=st.integers(1, 12), windows=st.booleans(), eos=st.sets(st.integers(0, VOCAB - 1), max_size=4),
        overlapped=st.booleans(), guesses=st.integers(0, 4), threshold=st.integers(0, 5),
        slots=st.integers(0, 14),
    )  # fmt: skip
    def start(self, blocks, page_size, seqs, budget, windows, eos, overlapped, guesses, threshold, slots):
        self.length = blocks * page_size + 1
        groups = (WINDOW, FULL) if windows else (FULL,)
        self.scheduler, self.runner = build(
            (blocks,) * len(groups), groups, page_size, seqs, budget, self.length, sorted(eos),
            guesses=0 if overlapped else guesses, long_prefill_token_threshold=threshold, slots=slots,
        )  # fmt: skip
        self.loop = Overlapped(self.scheduler, self.runner) if overlapped else None
        self.open: dict[tuple[str, str, int], list[int]] = {}
        self.count = 0

    def take(self, events: Events) -> None:
        for client, event in events:
            name = (client, event.request_id, event.choice)
            assert name in self.open, "an event after the end"
            self.open[name] += event.token_ids
            if event.finish_reason is not None:
                got, (prompt, most) = self.open.pop(name), self.asked[client, event.request_id]
                wanted = continuation(prompt, min(most, self.length - len(prompt)), VOCAB)
                ends = [i + 1 for i, t in enumerate(wanted) if t in self.scheduler.eos_token_ids]
                wanted = wanted[: ends[0]] if ends else wanted
                assert got == wanted[: len(got)]
                assert event.finish_reason == "abort" or got == wanted

    asked: dict[tuple[str, str], tuple[list[int], int]]

    @rule(data=st.data(), client=st.sampled_from("ab"), n=st.integers(1, 3), priority=st.integers(0, 2))
    def add(self, data, client, n, priority):
        size = data.draw(st.integers(1, min(self.length - 1, 30)))
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
        most = data.draw(st.integers(1, 12))
        name = str(self.count)
        self.count += 1
        self.asked = {**getattr(self, "asked", {}), (client, name): (prompt, most)}
        self.open |= {(client, name, choice): [] for choice in range(n)}
        wanted = request(name, prompt, client, n=n, max_tokens=most, priority=priority, ignore_eos=False, seed=1)
        self.take(self.scheduler.add(wanted, 0.0))

    @rule(data=st.data())
    def abort(self, data):
        if self.open:
            client, name, choice = data.draw(st.sampled_from(sorted(self.open)))
            self.take(self.scheduler.abort(client, name, data.draw(st.sampled_from([None, [choice]]))))

    @rule(paused=st.sets(st.sampled_from("ab")))
    def pause(self, paused):
        self.scheduler.paused_clients = frozenset(paused)

    @rule(client=st.sampled_from("ab"))
    def depart(self, client):
        self.scheduler.drop_client(client)
        self.open = {k: v for k, v in self.open.items() if k[0] != client}

    @rule(count=st.integers(1, 6))
    def run(self, count):
        for _ in range(count):
            self.take(self.step())

    def step(self) -> Events:
        return self.loop.step() if self.loop else step(self.scheduler, self.runner)

    @rule(one=st.booleans(), aside=st.booleans(), data=st.data())
    def fail(self, one, aside, data):
        if self.loop and self.loop.running:
            plan, self.loop.running = self.loop.running[0], None
        else:
            plan = self.scheduler.plan(0.0)
            self.runner.move(plan.moves)
        if not plan.chunks:
            return
        if self.loop and data.draw(st.booleans()):
            self.scheduler.plan(0.0)  # the one after it, which never starts
        if aside and self.scheduler.set_aside_newest(plan):
            self.take(self.step())
            events = self.scheduler.end_suspect(OctavoError("x"))
        else:
            fault = data.draw(st.sampled_from([c.sequence_id for c in plan.chunks])) if one else None
            events = self.scheduler.fail(plan, OctavoError("x"), fault)
        for client, event in events:
            assert event.finish_reason == "error"
            del self.open[client, event.request_id, event.choice]

    @invariant()
    def consistent(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            alive = {(s.request.client_id, s.request.request_id, s.choice) for s in
                     self.scheduler.running + self.scheduler.waiting}  # fmt: skip
            assert alive == set(self.open)

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.scheduler.paused_clients = frozenset()
            for _ in range(3000):
                if not self.scheduler.has_work:
                    break
                self.take(self.step())
            assert not self.open, "not everything came to an end"
            assert self.scheduler.blocks.num_used == 0


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
