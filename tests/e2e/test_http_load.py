"""Many at once with the default model: every stream gets its tokens, and who leaves gives back what was held."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp

from tests.e2e.server_process import events, wait_until
from tests.matrix import FULL

MIXED = Path(__file__).parents[1] / "workloads" / "mixed-64.json"
LEAVING = 16


def mixed_requests() -> list[dict]:
    """All 64 with their whole prompts; a quick run asks for a quarter of the output."""
    requests = json.loads(MIXED.read_text())
    assert len(requests) == 64
    return requests if FULL else [r | {"output_len": -(-r["output_len"] // 4)} for r in requests]


async def test_64_streams_at_once_each_get_exactly_their_tokens(server):
    requests = mixed_requests()

    async def one(session: aiohttp.ClientSession, request: dict) -> tuple[int, int, str]:
        body = {"model": "smollm2", "prompt": request["prompt_token_ids"], "max_tokens": request["output_len"],
                "ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        async with session.post("/v1/completions", json=body) as response:
            assert response.status == 200
            *parts, tail, done = list(events(await response.read()))
        assert done == "[DONE]"
        tokens = sum(len(p["choices"][0]["token_ids"]) for p in parts)
        return tokens, tail["usage"]["completion_tokens"], parts[-1]["choices"][0]["finish_reason"]

    timeout = aiohttp.ClientTimeout(total=280)
    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        got = await asyncio.gather(*(one(session, request) for request in requests))
    assert got == [(r["output_len"], r["output_len"], "length") for r in requests]
    wait_until(lambda: server.metrics()["octavo:kv_blocks_used"] == 0, 5, "all blocks are free")


def test_16_clients_that_disconnect_free_their_blocks_within_two_steps(server):
    """Steps are counted from the last look before they leave, so the count holds a step more than the abort's own."""
    body = {"prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    stays = server.open_stream("/v1/completions", body)
    stays.wait_for(b"data: ")
    leaving = [server.open_stream("/v1/completions", body) for _ in range(LEAVING)]
    for stream in leaving:
        stream.wait_for(b"data: ")
    assert server.metrics()["vllm:num_requests_running"] == LEAVING + 1
    seen: list[tuple[float, float, float]] = []
    for stream in leaving:
        stream.cut()

    def look() -> bool:
        shown = server.metrics()
        names = ("octavo:engine_steps_total", "vllm:num_requests_running", "octavo:kv_blocks_used")
        seen.append(tuple(shown[name] for name in names))
        return shown["vllm:num_requests_running"] == 1

    wait_until(look, 20, "only one is left")
    first_step, last_step = seen[0][0], seen[-1][0]
    assert last_step - first_step <= 2 + LEAVING, seen  # their sockets close one after another, each in its own step
    assert seen[-1][2] < seen[0][2] or len(seen) == 1, seen
    stays.cut()
    wait_until(lambda: server.health() == 200 and server.metrics()["octavo:kv_blocks_used"] == 0, 10, "all is free")
