"""What is found, shared or copied instead of computed gives the same bits: tokens and logprobs on a real tiny model."""

from __future__ import annotations

import pytest

from octavo.engine.types import Request
from tests.engine.tiny import VOCAB, LocalEngine, request
from tests.matrix import SEED

PAGE_SIZES = [16, 32]
"""that the kernels take, whose numbers do not depend on the batch"""


def prompts(rng, count: int, shared: int) -> list[list[int]]:
    """Of one beginning of `shared` tokens, and an end of each's own."""
    base = [rng.randrange(3, VOCAB) for _ in range(shared)]
    return [base + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(count)]


def sampled(name: str, prompt: list[int], salt: str | None = None, **fields) -> Request:
    asked = request(name, prompt, **{"temperature": 0.9, "seed": 5, "logprobs": 3, **fields})
    asked.cache_salt = salt
    return asked


def bits(choices) -> list[list[tuple]]:
    """Tokens and logprobs of each choice."""
    return [[(e.token_ids, [(p.token_ids, p.logprobs, p.rank) for p in e.logprobs]) for e in c] for c in choices]


def cold(folder, asked: list[Request], **settings) -> dict[str, list]:
    """Each answer of an engine that has computed nothing before."""
    return {r.request_id: bits(LocalEngine(folder, device_name="cpu", enable_prefix_caching=False, **settings).run(r)[
        r.request_id]) for r in asked}  # fmt: skip


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_a_warm_cache_changes_nothing_but_the_work(model, request, rng):
    asked = [sampled(str(i), p) for i, p in enumerate(prompts(rng, 5, shared=rng.randint(100, 180)))]
    folder, page_size = request.getfixturevalue(model), rng.choice(PAGE_SIZES)
    truth = cold(folder, asked, page_size=page_size)
    engine = LocalEngine(folder, device_name="cpu", page_size=page_size)
    for _ in range(2):
        for one in asked:
            got = engine.run(one)[one.request_id]
            assert bits(got) == truth[one.request_id], f"OCTAVO_SEED={SEED}"
    stats = engine.scheduler.stats
    assert stats.prefix_hits > 0.7 * stats.prefix_queries
    assert got[0][0].cached_tokens >= len(asked[-1].prompt_token_ids) - page_size


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_choices_share_the_prompt_and_are_those_that_each_compute(model, caching, request, rng):
    prompt = prompts(rng, 1, shared=rng.randint(40, 150))[0]
    folder, page_size = request.getfixturevalue(model), rng.choice(PAGE_SIZES)
    engine = LocalEngine(
        folder, device_name="cpu", page_size=page_size, budget=rng.choice([7, 64]), enable_prefix_caching=caching
    )
    asked = sampled("r", prompt, n=4)
    got = engine.run(asked)["r"]
    for choice in range(4):
        alone = LocalEngine(folder, device_name="cpu", page_size=page_size)
        alone.scheduler.add(sampled("r", prompt, n=4), 0.0)
        alone.scheduler.abort("", "r", [c for c in range(4) if c != choice])
        assert bits(alone.run().get("r"))[0] == bits(got)[choice], f"OCTAVO_SEED={SEED}"
    if model == "llama":
        assert [choice[0].cached_tokens for choice in got] == [0] + 3 * [len(prompt) - 1]


def test_logprobs_of_a_prompt_are_computed_and_its_blocks_are_found(llama, rng):
    prompt = prompts(rng, 1, shared=40)[0]
    engine = LocalEngine(llama, device_name="cpu", page_size=16)
    first, again, plain = (
        engine.run(sampled("r", prompt, **fields))["r"] for fields in ({"prompt_logprobs": 2},) * 2 + ({},)
    )
    assert first[0][0].prompt_logprobs == again[0][0].prompt_logprobs
    assert [c[0][0].cached_tokens > 0 for c in (first, again, plain)] == [False, False, True]
    assert bits(first) == bits(plain)


def test_salts_and_switched_off_caches_find_nothing(llama, rng):
    prompt = prompts(rng, 1, shared=40)[0]
    engine = LocalEngine(llama, device_name="cpu", page_size=16)
    found = [engine.run(sampled("r", prompt, salt))["r"][0][0].cached_tokens for salt in (None, "a", "b", "a", None)]
    assert [tokens > 0 for tokens in found] == [False, False, False, True, True]
    off = LocalEngine(llama, device_name="cpu", page_size=16, enable_prefix_caching=False)
    assert [off.run(sampled("r", prompt))["r"][0][0].cached_tokens for _ in range(2)] == [0, 0]
    assert off.scheduler.stats.prefix_queries == 0


def test_what_was_generated_is_found_in_the_next_turn(llama, rng):
    prompt = prompts(rng, 1, shared=30)[0]
    engine = LocalEngine(llama, device_name="cpu", page_size=16)
    answer = [t for e in engine.run(sampled("r", prompt, count=21))["r"][0] for t in e.token_ids]
    turn = engine.run(sampled("s", [*prompt, *answer, 9, 9]))["s"]
    assert turn[0][0].cached_tokens == (len(prompt) + 20) // 16 * 16
