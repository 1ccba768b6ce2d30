"""Prompt lookup over HTTP with the default model: the bits of the plain server's answers, fewer steps, and metrics."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.server_process import ServerProcess
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/speculation")
GUESSES = 4
WORDS = ["the", "cat", "sat", "on", "a", "red", "mat", "and", "saw", "two", "birds", "near", "an", "old", "tree"]


@pytest.fixture(scope="module")
def guessing(tmp_path_factory, smollm2_path):
    log = tmp_path_factory.mktemp("server") / "log"
    speculation = {
        "method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_min": 1, "prompt_lookup_max": 5
    }  # fmt: skip
    flags = ["--max-model-len", "2048", "--speculative-config", json.dumps(speculation)]
    with ServerProcess(log, str(smollm2_path), "--served-model-name", "smollm2", *flags) as running:
        yield running


def ask(server: ServerProcess, body: dict) -> list:
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return [
        (c["token_ids"], c["finish_reason"], c["logprobs"]["token_logprobs"], c["logprobs"]["top_logprobs"])
        for c in answer["choices"]
    ]


def test_answers_are_the_plain_servers_to_the_bit(server, guessing):
    """A text that repeats itself, greedy and sampled, with penalties, choices, and what ends an answer."""
    line = " ".join(RNG.choices(WORDS, k=9)) + ".\n"
    kinds = [
        {"temperature": 0}, {"temperature": 0, "max_tokens": 13}, {"temperature": 0.5, "seed": 1},
        {"temperature": 0.8, "seed": 2, "n": 3, "top_p": 0.9}, {"temperature": 0.3, "seed": 3, "stop": ["bird", "old"]},
        {"temperature": 0.4, "seed": 4, "frequency_penalty": 0.2, "presence_penalty": 0.1, "repetition_penalty": 1.05},
    ]  # fmt: skip
    bodies = [
        {"prompt": line * 4, "max_tokens": 40, "logprobs": 3, "ignore_eos": True, "return_token_ids": True, **kind}
        for kind in kinds
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        plain = list(pool.map(lambda body: ask(server, body), bodies))
        answers = list(pool.map(lambda body: ask(guessing, body), bodies))
    for kind, one, expected in zip(kinds, answers, plain, strict=True):
        assert one == expected, f"OCTAVO_SEED={SEED}, {kind}, {line!r}"
    shown = guessing.metrics()
    drafts, drafted, right = (
        shown[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert drafts <= drafted <= GUESSES * drafts and 0 < right < drafted
    assert shown["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == right
    text = guessing.call("GET", "/metrics")[2].decode()
    assert f'position="{GUESSES - 1}"' in text and f'position="{GUESSES}"' not in text
    assert not any("spec_decode" in name for name in server.metrics())
