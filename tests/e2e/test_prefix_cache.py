"""The prefix cache over HTTP with the default model: less prefill, the same bits, and both shown to who asks."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.server_process import ServerProcess
from tests.matrix import FULL, SEED

SHARED, REQUESTS = 1000, 64
AGAIN = REQUESTS if FULL else 1
"""answers that are computed cold, too"""
RNG = random.Random(f"{SEED}/prefix-cache")


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2_path):
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ["--max-model-len", "2048", "--enable-prompt-tokens-details"]
    with ServerProcess(log, str(smollm2_path), "--served-model-name", "smollm2", *flags) as running:
        yield running


def ask(server, prompt: list[int], salt: str, **more) -> dict:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0.8, "seed": 7, "logprobs": 2, "cache_salt": salt,
            "return_token_ids": True, "ignore_eos": True, **more}  # fmt: skip
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return answer


def bits(answer: dict) -> list[tuple]:
    return [(c["token_ids"], c["logprobs"]["token_logprobs"], c["logprobs"]["top_logprobs"]) for c in answer["choices"]]


def test_64_requests_that_share_1000_tokens_cost_a_fifth_of_their_prefill(server):
    base = [RNG.randrange(1000, 40_000) for _ in range(SHARED)]
    prompts = [base + [RNG.randrange(1000, 40_000) for _ in range(RNG.randint(1, 30))] for _ in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt, "warm"), prompts))
    shown = server.metrics()
    labelled = server.call("GET", "/metrics")[2].decode()
    total, cached = shown["vllm:prompt_tokens_total"], shown["vllm:prompt_tokens_cached_total"]
    assert total == sum(map(len, prompts))
    assert total >= 5 * (total - cached), f"computed {total - cached} of {total}, OCTAVO_SEED={SEED}"
    assert f'source="local_compute"}} {total - cached}' in labelled
    assert shown["vllm:prefix_cache_hits_total"] / shown["vllm:prefix_cache_queries_total"] > 0.8
    assert 'enable_prefix_caching="True"' in labelled
    details = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert sum(details) == cached
    for index in RNG.sample(range(REQUESTS), AGAIN):
        cold = ask(server, prompts[index], f"cold {index}")
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert bits(cold) == bits(answers[index]), f"OCTAVO_SEED={SEED}"


def test_choices_compute_their_prompt_once(server):
    prompt = [RNG.randrange(1000, 40_000) for _ in range(300)]
    before = server.metrics()
    several = ask(server, prompt, "choices", n=4)
    after = server.metrics()
    computed = after["vllm:prompt_tokens_total"] - after["vllm:prompt_tokens_cached_total"]
    computed -= before["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_cached_total"]
    assert computed == 300 + 3, "each choice computes the last token itself"
    assert several["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert several["usage"]["prompt_tokens"] == 300
    assert bits(several) == bits(ask(server, prompt, "other choices", n=4))
