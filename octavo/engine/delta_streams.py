"""Streams of deltas made from others: fewer and larger ones, or only those of the best choices. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from octavo.engine.outputs import ChoiceDelta

Deltas = AsyncGenerator[list[ChoiceDelta], None]


def joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """One delta that says what these said, one after the other, of one choice."""
    last = deltas[-1]
    logprobs = [position for delta in deltas for position in delta.logprobs or ()]
    told = [delta for delta in deltas if delta.prompt_logprobs is not None]
    return ChoiceDelta(
        last.index, "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.token_ids],
        logprobs if any(delta.logprobs is not None for delta in deltas) else None, last.finish_reason,
        last.stop_reason, told[0].prompt_logprobs if told else None, sum(delta.cached_tokens for delta in deltas),
    )  # fmt: skip


async def spaced(stream: Deltas, interval: int) -> Deltas:
    """Holds a choice's deltas back until they have `interval` tokens; the first and the last come at once."""
    begun: set[int] = set()
    held: defaultdict[int, list[ChoiceDelta]] = defaultdict(list)
    async with aclosing(stream):
        async for deltas in stream:
            given = []
            for delta in deltas:
                mine = held[delta.index]
                mine.append(delta)
                enough = sum(len(one.token_ids) for one in mine) >= interval
                if enough or delta.index not in begun or delta.finish_reason is not None:
                    begun.add(delta.index)
                    given.append(joined(held.pop(delta.index)))
            if given:
                yield given


async def best_of(stream: Deltas, n: int, with_logprobs: bool) -> Deltas:
    """The `n` choices whose chosen tokens' logprobs have the highest sum, best first, each whole; vLLM's `best_of`.

    `stream` has logprobs; they are given on only `with_logprobs`. Of equals the one of lower index is better.
    """
    parts: defaultdict[int, list[ChoiceDelta]] = defaultdict(list)
    async with aclosing(stream):
        async for deltas in stream:
            for delta in deltas:
                parts[delta.index].append(delta)
    choices = [joined(parts[index]) for index in sorted(parts)]
    prompt_logprobs = next((c.prompt_logprobs for c in choices if c.prompt_logprobs is not None), None)
    cached = choices[0].cached_tokens if choices else 0  # the others find what this one computed
    best = sorted(choices, key=_cumulative_logprob, reverse=True)[:n]
    for index, choice in enumerate(best):
        choice.index, choice.prompt_logprobs, choice.cached_tokens = index, None, cached
        choice.logprobs = choice.logprobs if with_logprobs else None
    if best:
        best[0].prompt_logprobs = prompt_logprobs
        yield best


def _cumulative_logprob(choice: ChoiceDelta) -> float:
    return sum(position.logprobs[0] for position in choice.logprobs or ())
