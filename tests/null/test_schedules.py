"""Random schedules, each from its own seed: what shares, copies, evicts and resumes still gives the model's answers.

10,000 of them in a full run. A sequence is only let to read what stands for its own tokens, under its own salt.
"""

from __future__ import annotations

import random

import pytest

from octavo.backends.kv import FullAttention, SlidingWindow
from octavo.engine.plan import COPY, LOAD, StepPlan, StepResult, fill_in
from octavo.engine.roster import Events
from octavo.engine.types import TokenEvent
from octavo.errors import OctavoError
from tests.matrix import SEED, sample
from tests.null.memory import continuation
from tests.null.test_beams import plain_search
from tests.null.test_scheduler import VOCAB, build, request

NUM_PARTS, PART = 100, 100
FULL_ATTENTION = FullAttention(1, 1)
SPECS = [
    (FULL_ATTENTION,), (SlidingWindow(1, 1, 5), FULL_ATTENTION), (SlidingWindow(1, 1, 7),),
    (FULL_ATTENTION, SlidingWindow(1, 1, 3), SlidingWindow(1, 1, 9)),
]  # fmt: skip
SALTS = [None, "salt"]


class Schedule:
    """One engine's loop, plain or overlapped, with random company."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        specs, page_size = rng.choice(SPECS), rng.randint(1, 4)
        blocks = rng.randint(24 // page_size, 80 // page_size)
        self.length = blocks * page_size + 1
        self.overlapped = rng.random() < 0.5
        self.eos = sorted(rng.sample(range(VOCAB), rng.choice([0, 3])))
        self.scheduler, self.runner = build(
            (blocks,) * len(specs), specs, page_size, rng.randint(1, 8), rng.choice([1, 3, 8, 30, 100]), self.length,
            self.eos, guesses=0 if self.overlapped else rng.choice([0, 0, 3]),
            long_prefill_token_threshold=rng.choice([0, 0, 4]), enable_prefix_caching=rng.random() < 0.75,
            slots=rng.choice([0, rng.randint(1, blocks), 3 * blocks]),
        )  # fmt: skip
        known = self.scheduler._sequences
        self.runner.root_of = lambda new: SALTS.index(known[new.sequence_id].request.cache_salt)
        self.bases = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
        self.asked: dict[tuple[str, str, int], tuple[list[int], list[int], bool]] = {}
        self.got: dict[tuple[str, str, int], list[TokenEvent]] = {}
        self.ended: set[tuple[str, str, int]] = set()
        self.running: tuple[StepPlan, StepResult] | None = None

    def add(self) -> None:
        rng, number = self.rng, len(self.asked)
        prompt = rng.choice(self.bases)[: rng.randint(0, 40)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]
        prompt = (prompt or [1])[: self.length - 13]
        most, n, logprobs = rng.randint(1, 12), rng.choice([1, 1, 2, 4]), rng.random() < 0.15
        wanted = self.answer(prompt, most)
        carried = [wanted[: rng.randint(0, len(wanted) - 1)] for _ in range(n)] if rng.random() < 0.2 else []
        client, name, salt = rng.choice("ab"), str(number), rng.choice(SALTS)
        asked = request(
            name, prompt, client, n=n, max_tokens=most, seed=1, ignore_eos=False, priority=rng.randint(0, 2),
            prompt_logprobs=0 if logprobs else None, output_token_ids=carried,
        )  # fmt: skip
        asked.cache_salt = salt
        for choice in range(n):
            self.asked[client, name, choice] = (prompt, wanted[len(carried[choice]) if carried else 0 :], logprobs)
            self.got[client, name, choice] = []
        self.take(self.scheduler.add(asked, 0.0))

    def add_beams(self) -> None:
        rng, client, name = self.rng, self.rng.choice("ab"), str(len(self.asked))
        prompt = (rng.choice(self.bases)[: rng.randint(1, 30)])[: self.length - 13]
        most, width = rng.randint(1, 8), rng.randint(1, 4)
        n = rng.randint(1, width)
        asked = request(
            name, prompt, client, n=n, best_of=width, use_beam_search=True, max_tokens=most, ignore_eos=False,
            priority=rng.randint(0, 2),
        )  # fmt: skip
        asked.cache_salt = rng.choice(SALTS)
        for choice, (tokens, _) in enumerate(plain_search(prompt, width, n, most, self.eos)):
            self.asked[client, name, choice] = (prompt, tokens, False)
            self.got[client, name, choice] = []
        self.take(self.scheduler.add(asked, 0.0))

    def answer(self, prompt: list[int], most: int) -> list[int]:
        wanted = continuation(prompt, most, VOCAB)
        ends = [i + 1 for i, token in enumerate(wanted) if token in self.eos]
        return wanted[: ends[0]] if ends else wanted

    def take(self, events: Events) -> None:
        for client, event in events:
            name = (client, event.request_id, event.choice)
            assert name not in self.ended, "an event after the end"
            self.got[name].append(event)
            if event.finish_reason is not None:
                self.ended.add(name)
        self.scheduler.check_integrity()

    def plan(self) -> StepPlan:
        blocks, before = self.scheduler.blocks, self.scheduler.stats.preemptions
        owed = len(self.scheduler._moves)  # of a plan that never ran: who held their targets may be gone
        plan = self.scheduler.plan(0.0)
        self.scheduler.check_integrity()
        held = {s.sequence_id: s.held for s in self.scheduler.running}
        for chunk in plan.chunks:
            assert blocks.may_write(held[chunk.sequence_id], chunk.start, chunk.end), "writes what others read"
        if before == self.scheduler.stats.preemptions:
            copies = [move for move in plan.moves[owed:] if move.kind == COPY]
            assert all(blocks.pools[move.group].may_write(move.target) for move in copies), "copied over"
            loads = [move for move in plan.moves[owed:] if move.kind == LOAD]
            assert all(blocks.pools[move.group].is_held(move.target) for move in loads), "loaded for nobody"
        return plan

    def step(self) -> None:
        plan, before = self.plan(), self.running
        if not self.overlapped:
            if plan.chunks:
                self.take(self.scheduler.commit(plan, self.runner.run(plan)))
            return
        self.running = None
        if plan.chunks:
            if before is not None:
                fill_in(plan, *before)
            self.running = (plan, self.runner.run(plan))
        if before is not None:
            self.take(self.scheduler.commit(*before))

    def fail(self) -> None:
        """A step, of which only the moves were done, or which was computed though its answer was lost."""
        if self.running is not None:
            plan, self.running = self.running[0], None
            if self.rng.random() < 0.5:
                self.plan()
        else:
            plan = self.plan()
            self.runner.move(plan.moves)
        if plan.chunks:
            self.take(self.scheduler.fail(plan, OctavoError("x"), self.rng.choice(plan.chunks).sequence_id))

    def run(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        for _ in range(rng.randint(3, 25)):
            action = rng.random()
            if action < 0.33:
                self.add()
            elif action < 0.4:
                self.add_beams()
            elif action < 0.5 and self.asked:
                client, name, choice = rng.choice(sorted(self.asked))
                self.take(scheduler.abort(client, name, rng.choice([None, [choice]])))
            elif action < 0.55:
                scheduler.paused_clients = frozenset(rng.choice(["", "a", "b"]))
            elif action < 0.6:
                self.fail()
            for _ in range(rng.randint(0, 4)):
                self.step()
        scheduler.paused_clients = frozenset()
        for _ in range(5000):
            if not scheduler.has_work:
                break
            self.step()
        self.check()

    def check(self) -> None:
        assert self.ended == self.asked.keys(), "not each choice has one end"
        for name, (prompt, wanted, logprobs) in self.asked.items():
            events = self.got[name]
            tokens = [token for event in events for token in event.token_ids]
            assert tokens == wanted[: len(tokens)]
            assert events[-1].finish_reason in ("abort", "error") or tokens == wanted
            assert all(event.cached_tokens == 0 for event in events[1:])
            assert events[0].cached_tokens <= len(prompt) and (events[0].token_ids or not events[0].cached_tokens)
            if logprobs and name[2] == 0 and tokens:
                assert [p.token_ids[0] for p in events[0].prompt_logprobs[1:]] == prompt[1:]
                assert events[0].cached_tokens == 0
        stats = self.scheduler.snapshot()
        assert stats.blocks_used == 0
        assert stats.prefix_hits == 0 or self.scheduler.prefix_caching


@pytest.mark.parametrize("part", sample(range(NUM_PARTS), 2))
def test_random_schedules(part):
    hits = preemptions = swapped = from_host = ended = 0
    for number in range(part * PART, (part + 1) * PART):
        schedule = Schedule(SEED * NUM_PARTS * PART + number)
        try:
            schedule.run()
        except Exception as error:
            raise AssertionError(f"Schedule({SEED * NUM_PARTS * PART + number}).run()") from error
        stats = schedule.scheduler.stats
        hits, preemptions = hits + stats.prefix_hits, preemptions + stats.preemptions
        swapped, from_host = swapped + stats.preemptions_swapped, from_host + stats.cached_by_source.get("host", 0)
        ended += sum(events[-1].finish_reason in ("stop", "length") for events in schedule.got.values())
    shown = (
        f"{hits} tokens found, {from_host} on the host, {preemptions} preemptions, {swapped} swapped, "
        f"{ended} whole answers, OCTAVO_SEED={SEED}"
    )
    assert min(hits, preemptions, ended) > PART // 2 and min(swapped, from_host) > PART // 8, shown
