"""Merging, departures and framing, with streams whose course the test decides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from octavo.engine.outputs import ChoiceDelta
from octavo.errors import EngineDead
from octavo.server.stream import EventStream, merged
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/stream")


async def numbers(
    count: int, closed: list[int], name: int, fail_at: int = -1
) -> AsyncGenerator[list[ChoiceDelta], None]:
    try:
        for i in range(count):
            if i == fail_at:
                raise EngineDead("gone")
            await asyncio.sleep(RNG.choice((0, 0, 0.001)))
            yield [ChoiceDelta(0, str(i), [i])]
    finally:
        closed.append(name)


@pytest.mark.parametrize("prompts", [1, 2, 7])
async def test_merged_keeps_every_delta_in_order(prompts):
    counts = [RNG.randint(0, 20) for _ in range(prompts)]
    closed: list[int] = []
    got: dict[int, list[int]] = {i: [] for i in range(prompts)}
    async for index, deltas in merged([numbers(n, closed, i) for i, n in enumerate(counts)]):
        got[index] += [t for d in deltas for t in d.token_ids]
    assert got == {i: list(range(n)) for i, n in enumerate(counts)}, f"OCTAVO_SEED={SEED}"
    assert sorted(closed) == list(range(prompts))


@pytest.mark.parametrize("prompts", [1, 4])
async def test_an_error_of_one_prompt_ends_all(prompts):
    closed: list[int] = []
    streams = [numbers(10_000, closed, i) for i in range(prompts - 1)] + [numbers(9, closed, prompts - 1, fail_at=5)]
    with pytest.raises(EngineDead):
        async for _ in merged(streams):
            pass
    assert sorted(closed) == list(range(prompts))


@pytest.mark.parametrize("prompts", [1, 4])
async def test_leaving_early_closes_all(prompts):
    closed: list[int] = []
    async with aclosing(merged([numbers(10_000, closed, i) for i in range(prompts)])) as stream:
        async for _ in stream:
            break
    assert len(closed) in (prompts, 1) if prompts > 1 else closed == [0]


async def respond(stream: EventStream, receive=None) -> list[dict]:
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    async def never():
        await asyncio.Event().wait()

    await stream({"type": "http"}, receive or never, send)
    return sent


async def frames(count: int, error: Exception | None, closed: list[int]) -> AsyncGenerator[bytes, None]:
    try:
        for i in range(count):
            yield b"data: %d\n\n" % i
        if error:
            raise error
    finally:
        closed.append(1)


@pytest.mark.parametrize("error", [None, EngineDead("gone"), RuntimeError("our bug")])
async def test_a_stream_always_ends_with_done(error, caplog):
    closed: list[int] = []
    sent = await respond(EventStream(frames(3, error, closed)))
    text = b"".join(m.get("body", b"") for m in sent).decode()
    assert sent[0]["status"] == 200
    assert text.endswith("data: [DONE]\n\n")
    assert closed == [1]
    assert not sent[-1].get("more_body", False)
    if error is not None:
        assert '"error":{' in text
        assert "our bug" not in text, "the details of our bugs are nobody else's business"


async def test_a_departed_client_ends_the_stream_at_once():
    closed: list[int] = []

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 0\n\n"
            await asyncio.Event().wait()
        finally:
            closed.append(1)

    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    await asyncio.wait_for(respond(EventStream(endless()), receive), 2)
    assert closed == [1]
