"""Beam search against a plain one that computes every beam anew, alone and in random company."""

from __future__ import annotations

import random

import pytest

from octavo.engine.beams import Beam, BeamSearch
from octavo.engine.types import SamplingParams, TokenEvent
from octavo.errors import InvalidRequest, OctavoError
from tests.matrix import SEED
from tests.null.memory import likeliest
from tests.null.test_scheduler import VOCAB, build, finish, request, step


def plain_search(prompt, width, n, most, eos=(), stops=(), penalty=1.0):
    """[(tokens, finish reason)] of the best `n`, by the definition: every step, every beam from its first token on."""

    def score(beam):
        tokens, logprob, reason = beam
        return logprob / (len(prompt) + len(tokens) - (reason == "stop")) ** penalty

    beams, ended = [([], 0.0, None)], []
    for length in range(1, most + 1):
        longer = []
        for tokens, logprob, _ in beams:
            best = likeliest(prompt + tokens, 2 * width, VOCAB)
            for token, more in zip(best.token_ids[1:], best.logprobs[1:], strict=True):
                ends = token in eos or token in stops
                beam = ([*tokens, token], logprob + more, "stop" if ends else "length" if length == most else None)
                (ended if ends else longer).append(beam)
        beams = sorted(longer, key=score, reverse=True)[:width]
    return [(tokens, reason) for tokens, _, reason in sorted(ended + beams, key=score, reverse=True)[:n]]


def ends_of(answers, name="r") -> list[tuple[list[int], str | None]]:
    """Of each choice its tokens and finish reason; each has one event."""
    found = [events for (request_id, _), events in sorted(answers.items()) if request_id == name]
    assert all(len(events) == 1 for events in found), "a beam told something before the end"
    return [(events[0].token_ids, events[0].finish_reason) for events in found]


@pytest.mark.parametrize("part", range(3))
def test_the_answer_is_that_of_a_plain_search(part):
    rng = random.Random(f"{SEED}/beams/{part}")
    for _ in range(15):
        width, most = rng.randint(1, 6), rng.randint(1, 12)
        n, penalty = rng.randint(1, width), rng.choice([0.0, 1.0, 1.0, 2.5, -1.0])
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        eos, stops = rng.sample(range(VOCAB), rng.choice([0, 4])), rng.sample(range(VOCAB), rng.choice([0, 3]))
        scheduler, runner = build(
            (rng.randint(14, 60),), page_size=rng.randint(2, 4), seqs=rng.randint(1, 8), budget=rng.choice([2, 7, 40]),
            length=28, eos=eos, enable_prefix_caching=rng.random() < 0.5,
        )  # fmt: skip
        asked = {"n": n, "best_of": width, "use_beam_search": True, "length_penalty": penalty, "stop_token_ids": stops}
        scheduler.add(request("r", prompt, max_tokens=most, ignore_eos=False, **asked), 0.0)
        for number in range(rng.randint(0, 3)):
            scheduler.add(request(str(number), [rng.randrange(VOCAB)] * 5, max_tokens=9), 0.0)
        wanted = plain_search(prompt, width, n, most, eos, stops, penalty)
        assert ends_of(finish(scheduler, runner)) == wanted, f"OCTAVO_SEED={SEED}"
        assert scheduler.blocks.num_used == 0


def test_beams_share_their_prompt_and_what_they_have_in_common():
    scheduler, runner = build((40,), page_size=4, budget=64, seqs=8)
    scheduler.add(request("r", range(21), n=4, use_beam_search=True, max_tokens=8), 0.0)
    most_used = 0
    while scheduler.has_work:
        step(scheduler, runner)
        most_used = max(most_used, scheduler.blocks.num_used)
    assert most_used <= 5 + 4 * 3, "five full blocks of the prompt are held once"
    assert scheduler.stats.step_tokens < 21 + 4 * 2 * 8, "a beam computes its last token and what it copied no more"
    assert scheduler.stats.prompt_tokens == 21
    assert scheduler.stats.generation_tokens == 32


def test_logprobs_of_an_answer_are_those_of_its_tokens():
    scheduler, runner = build((40,))
    scheduler.add(request("r", [1, 2, 3], n=3, use_beam_search=True, max_tokens=5, logprobs=2), 0.0)
    for event in (events[0] for events in finish(scheduler, runner).values()):
        for place, (token, shown) in enumerate(zip(event.token_ids, event.logprobs, strict=True)):
            best = likeliest([1, 2, 3, *event.token_ids[:place]], 6, VOCAB)
            rank = best.token_ids.index(token, 1)
            assert shown.token_ids == [token, *best.token_ids[1:3]]
            assert shown.logprobs == [best.logprobs[rank], *best.logprobs[1:3]]
            assert shown.rank == rank


def beams_under_way():
    scheduler, runner = build((40,), seqs=8)
    scheduler.add(request("r", [1, 2, 3], n=3, use_beam_search=True, max_tokens=9), 0.0)
    scheduler.add(request("other", [4, 5]), 0.0)
    for _ in range(4):
        assert not [e for _, e in step(scheduler, runner) if e.request_id == "r"]
    return scheduler, runner


def test_beams_end_together():
    scheduler, runner = beams_under_way()
    events = [event for _, event in scheduler.abort("c", "r", [1])]
    assert [(e.choice, e.finish_reason) for e in events] == [(1, "abort")]
    wanted = plain_search([1, 2, 3], 3, 3, 9)
    answers = finish(scheduler, runner)
    assert ends_of(answers) == [wanted[0], wanted[2]]
    for end in ("abort", "expire", "end_all", "fail"):
        scheduler, runner = beams_under_way()
        if end == "abort":
            events = scheduler.abort("c", "r")
        elif end == "expire":
            next(iter(scheduler.running)).request.deadline = 1.0
            events = scheduler.expire(2.0)
        elif end == "end_all":
            events = scheduler.end_all(OctavoError("x"))
        else:
            plan = scheduler.plan(0.0)
            mine = next(s for s in scheduler.running if s.request.request_id == "r")
            events = scheduler.fail(plan, OctavoError("x"), mine.sequence_id)
        reason = "abort" if end in ("abort", "expire") else "error"
        mine = [(e.choice, e.finish_reason) for _, e in events if e.request_id == "r"]
        assert mine == [(0, reason), (1, reason), (2, reason)], end
        scheduler.check_integrity()


def test_what_beam_search_does_not_look_at_is_refused():
    scheduler, _ = build()
    for wrong, words in (
        ({"repetition_penalty": 1.1}, "repetition_penalty"), ({"stop": ("x",)}, "stop"), ({"min_tokens": 1}, "min_tok"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"), ({"n": VOCAB // 2 + 1}, "half"), ({"length_penalty": 11.0}, "-10"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"), ({"logprobs": -1}, "logprobs"),
        ({"output_token_ids": [[1]]}, "output_token_ids"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=words):
            scheduler.add(request(**{"use_beam_search": True, **wrong}), 0.0)
    assert not scheduler.has_work


def test_the_search_is_pure_and_keeps_no_more_than_is_asked_for():
    search = BeamSearch(1, SamplingParams(n=2, use_beam_search=True), eos=range(0, VOCAB, 2), most_tokens=50)
    told = [(Beam(), likeliest([1], 4, VOCAB))]
    for _ in range(20):
        told = [(b, likeliest([1, *b.token_ids], 4, VOCAB)) for _, b in search.advance(told)]
    assert len(search.answer()) == 2


def test_events_of_beams_are_plain_ones():
    scheduler, runner = build()
    scheduler.add(request("r", [1, 2], n=2, use_beam_search=True, max_tokens=3), 0.0)
    events = [event for events in finish(scheduler, runner).values() for event in events]
    assert all(isinstance(event, TokenEvent) and event.logprobs is None for event in events)
