"""Streams made from streams: larger deltas, and the best of several choices."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

from octavo.engine.delta_streams import best_of, joined, spaced
from octavo.engine.outputs import ChoiceDelta
from octavo.engine.types import TokenLogprobs
from tests.matrix import SEED

NOTE = f"OCTAVO_SEED={SEED}"


def parts_of(rng, choices):
    """Rounds of deltas of several choices, each choice with an end."""
    left = {index: rng.randint(1, 12) for index in range(choices)}
    rounds = []
    while left:
        now = []
        for index in rng.sample(sorted(left), rng.randint(1, len(left))):
            count = min(left[index], rng.choice([1, 1, 1, 2]))
            tokens = [rng.randrange(100) for _ in range(count)]
            logprobs = [TokenLogprobs([t], [-rng.random()], 1) for t in tokens]
            delta = ChoiceDelta(index, "".join(f"<{t}>" for t in tokens), tokens, logprobs)
            left[index] -= count
            if not left[index]:
                delta.finish_reason, delta.stop_reason = "stop", rng.choice([None, "x", 5])
                del left[index]
            now.append(delta)
        rounds.append(now)
    rounds[0][0].prompt_logprobs = [None, TokenLogprobs([1], [-1.0], 1)]
    return rounds


def collected(stream):
    async def work():
        return [deltas async for deltas in stream]

    return asyncio.run(work())


async def played(rounds):
    for deltas in rounds:
        yield list(deltas)


def by_choice(rounds):
    found = defaultdict(list)
    for deltas in rounds:
        for delta in deltas:
            found[delta.index].append(delta)
    return {index: found[index] for index in sorted(found)}


def test_spaced_deltas_say_the_same_in_fewer_words():
    rng = random.Random(f"{SEED}/spaced")
    for _ in range(200):
        rounds, interval = parts_of(rng, rng.randint(1, 4)), rng.randint(1, 6)
        told, given = by_choice(rounds), by_choice(collected(spaced(played(rounds), interval)))
        assert {i: joined(d) for i, d in told.items()} == {i: joined(d) for i, d in given.items()}, NOTE
        for index, deltas in given.items():
            assert deltas[0] == told[index][0], f"the first comes as it is; {NOTE}"
            assert all(len(d.token_ids) >= interval for d in deltas[1:-1]), f"interval {interval} {NOTE}"
            assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_the_best_of_several_choices():
    rng = random.Random(f"{SEED}/best")
    for _ in range(200):
        choices = rng.randint(1, 6)
        n, rounds, shown = rng.randint(1, choices), parts_of(rng, choices), rng.random() < 0.5
        wholes = {index: joined(deltas) for index, deltas in by_choice(rounds).items()}
        sums = {i: sum(p.logprobs[0] for p in whole.logprobs) for i, whole in wholes.items()}
        order = sorted(sums, key=lambda i: (-sums[i], i))[:n]
        ((*given,),) = collected(best_of(played(rounds), n, shown))
        assert [d.index for d in given] == list(range(n))
        for delta, index in zip(given, order, strict=True):
            whole = wholes[index]
            assert (delta.text, delta.token_ids) == (whole.text, whole.token_ids), NOTE
            assert (delta.finish_reason, delta.stop_reason) == (whole.finish_reason, whole.stop_reason)
            assert delta.logprobs == (whole.logprobs if shown else None)
        assert given[0].prompt_logprobs == [None, TokenLogprobs([1], [-1.0], 1)]
        assert all(d.prompt_logprobs is None for d in given[1:])


def test_the_best_choice_tells_what_of_the_prompt_was_cached_before_the_request():
    """Not what the choice that came out best found, which the first one had computed."""
    worse = ChoiceDelta(0, "a", [1], [TokenLogprobs([1], [-5.0], 1)], "stop", cached_tokens=0)
    better = ChoiceDelta(1, "b", [2], [TokenLogprobs([2], [-1.0], 1)], "stop", cached_tokens=3)
    (best,) = collected(best_of(played([[worse], [better]]), 1, False))
    assert [(c.text, c.cached_tokens) for c in best] == [("b", 0)]
