"""Scheduler and runner on a real tiny model, against transformers and against an independent sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.engine.noise import noise_key, noise_keys, noise_stem
from octavo.engine.penalties import TokenCounts
from octavo.engine.plan import SequenceFault
from octavo.engine.types import RepetitionDetectionParams
from octavo.errors import OctavoError
from tests.engine.test_speculation import drafts_of
from tests.engine.tiny import VOCAB, LocalEngine, request, tokens_of, transformers_model, true_logits
from tests.matrix import SEED

SAY_SEED = f"OCTAVO_SEED={SEED}"


def prompts(rng, count, low=1, high=60):
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


def greedy(folder, prompt, count):
    out = transformers_model(folder).generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
        min_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_greedy_equals_transformers(model, request, rng):
    folder = request.getfixturevalue(model)
    asked = prompts(rng, 6)
    engine = LocalEngine(folder, budget=rng.choice([16, 33, 64]), page_size=rng.choice([1, 3, 4, 16]))
    answers = engine.run(*(_greedy_request(i, p) for i, p in enumerate(asked)))
    for i, prompt in enumerate(asked):
        assert tokens_of(answers[str(i)][0]) == greedy(folder, prompt, 12), f"{SAY_SEED}, prompt {prompt}"


def _greedy_request(i, prompt):
    return request(str(i), prompt)


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_preemption_and_chunks_change_nothing(model, request, rng):
    folder = request.getfixturevalue(model)
    asked = [
        _sampled(str(i), p, count=20, seed=i, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, top_k=30)
        for i, p in enumerate(prompts(rng, 5, high=12))
    ]
    roomy = LocalEngine(folder).run(*asked)
    engine = LocalEngine(folder, blocks=14 if model == "llama" else 7, budget=8)
    tight = engine.run(*asked)
    assert engine.scheduler.stats.preemptions > 0 or model == "mistral", "windows may give back enough in time"
    for name in roomy:
        assert tokens_of(tight[name][0]) == tokens_of(roomy[name][0]), SAY_SEED
        assert tight[name][0][-1].finish_reason == "length"
    assert engine.scheduler.blocks.num_used == 0


EVERYTHING = {
    "bias": lambda rng: {"logit_bias": {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(20)}},
    "allowed": lambda rng: {"allowed_token_ids": rng.sample(range(VOCAB), 60)},
    "bad words": lambda rng: {"bad_word_ids": tuple((a, b) for a in range(0, VOCAB, 2) for b in range(0, VOCAB, 5))},
    "minimum": lambda rng: {"min_tokens": 12, "stop_token_ids": rng.sample(range(VOCAB), 60), "ignore_eos": False},
    "thinking": lambda rng: {"thinking_token_budget": 4, "thinking_marks": (5, 6), "logit_bias": {5: 4.0, 6: -9.0}},
    "penalties": lambda rng: {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": -0.5},
    "repetition": lambda rng: {
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_count=2),
        "top_k": 3,
    },
    "listed": lambda rng: {"logprobs": None, "logprob_token_ids": rng.sample(range(VOCAB), 5)},
}


@pytest.mark.parametrize("names", [[name] for name in EVERYTHING] + [["bad words", "minimum", "penalties", "thinking"]],
                         ids=" and ".join)  # fmt: skip
def test_no_parameter_remembers_more_than_the_sequence_itself(llama, rng, names):
    """Alone, preempted in a crowd, and with guesses that are taken back: what a parameter keeps is the same."""
    asked = []
    for i, prompt in enumerate(prompts(rng, 4, low=28, high=31)):
        fields = {"temperature": rng.choice([0.0, 1.0]), "seed": i, "logprobs": 2}
        for name in names:
            fields |= EVERYTHING[name](rng)
        asked.append(_sampled(str(i), prompt, count=30, **fields))
    roomy = LocalEngine(llama, device_name="cpu", page_size=16)
    alone = {one.request_id: roomy.run(one)[one.request_id] for one in asked}
    tight = LocalEngine(llama, device_name="cpu", page_size=16, blocks=5, budget=rng.choice([16, 40]))
    crowded = tight.run(*asked)
    assert tight.scheduler.stats.preemptions > 0 or names in (["repetition"], ["minimum"]), "these may end early"
    guessing = LocalEngine(llama, device_name="cpu", page_size=16, speculation=drafts_of(llama, rng.randint(1, 5)))
    guessed = guessing.run(*asked)
    assert guessing.scheduler.stats.accepted_tokens > 0
    for name, (events,) in alone.items():
        for (others,) in (crowded[name], guessed[name]):
            assert tokens_of(others) == tokens_of(events), SAY_SEED
            logprobs, expected = ([p for e in es for p in e.logprobs or ()] for es in (others, events))
            assert logprobs == expected, SAY_SEED
            last = others[-1]
            assert (last.finish_reason, last.stop_reason) == (events[-1].finish_reason, events[-1].stop_reason)


def _sampled(name, prompt, **fields):
    return request(name, prompt, **{"temperature": 1.0, **fields})


def test_the_company_changes_nothing(llama, rng):
    engine = LocalEngine(llama)
    mine = _sampled("mine", prompts(rng, 1)[0], seed=7, logprobs=5, prompt_logprobs=2)
    others = [_sampled(str(i), p, temperature=rng.random()) for i, p in enumerate(prompts(rng, 9))]
    alone, crowded = engine.run(mine)["mine"][0], engine.run(*others[:5], mine, *others[5:])["mine"][0]
    assert tokens_of(alone) == tokens_of(crowded), SAY_SEED
    for a, b in zip(alone, crowded, strict=True):
        np.testing.assert_allclose(a.logprobs[0].logprobs, b.logprobs[0].logprobs, atol=2e-4, err_msg=SAY_SEED)


def test_seeds_choices_and_resumption(llama, rng):
    engine = LocalEngine(llama)
    prompt = prompts(rng, 1)[0]
    first = [tokens_of(c) for c in engine.run(_sampled("a", prompt, n=3, seed=11))["a"]]
    again = [tokens_of(c) for c in engine.run(_sampled("b", prompt, n=3, seed=11))["b"]]
    other = [tokens_of(c) for c in engine.run(_sampled("c", prompt, n=3, seed=12))["c"]]
    assert first == again
    assert len({tuple(t) for t in first + other}) == 6, "different noise must give different texts"
    unseeded = [tuple(tokens_of(engine.run(_sampled("d", prompt))["d"][0])) for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    carried = _sampled("e", prompt, n=3, seed=11, output=[t[:5] for t in first])
    assert [tokens_of(c) for c in engine.run(carried)["e"]] == [t[5:] for t in first]


def test_logprobs_are_those_of_the_raw_logits(llama, rng):
    prompt = prompts(rng, 1, low=20)[0]
    asked = _sampled("r", prompt, seed=3, logprobs=4, prompt_logprobs=3, repetition_penalty=1.5, temperature=0.7)
    plain = _sampled("p", prompt, seed=4)
    events = LocalEngine(llama, budget=7).run(plain, asked)["r"][0]
    tokens = tokens_of(events)
    scores = true_logits(llama, prompt + tokens).log_softmax(-1)
    reported = [*events[0].prompt_logprobs[1:], *(e.logprobs[0] for e in events)]
    assert events[0].prompt_logprobs[0] is None
    assert all(e.prompt_logprobs is None for e in events[1:])
    for position, (token, got) in enumerate(zip((prompt + tokens)[1:], reported, strict=True)):
        row = scores[position]
        top = row.topk(3 if position < len(prompt) - 1 else 4)
        assert got.token_ids == [token, *top.indices.tolist()]
        assert got.rank == int((row > row[token]).sum()) + 1
        np.testing.assert_allclose(got.logprobs, [row[token], *top.values.tolist()], atol=1e-3)


CASES = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5, "temperature": 1.5},
    "top_p": {"top_p": 0.6, "temperature": 1.5},
    "min_p": {"min_p": 0.2, "temperature": 1.5},
    "all filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 2.0},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.2},
    "all penalties": {"repetition_penalty": 0.6, "presence_penalty": 2.0, "frequency_penalty": 1.0, "top_k": 9},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.9, "frequency_penalty": 0.5},
}


def test_sampling_equals_an_independent_one(llama, rng):
    """All kinds at once in one batch, each step checked against numpy on transformers' logits."""
    engine = LocalEngine(llama)
    asked = [
        _sampled(name, prompt, seed=rng.randrange(-(1 << 62), 1 << 62), count=16, **fields)
        for (name, fields), prompt in zip(CASES.items(), prompts(rng, len(CASES), high=25), strict=True)
    ]
    answers = engine.run(*asked)
    for one in asked:
        tokens = tokens_of(answers[one.request_id][0])
        logits = true_logits(llama, one.prompt_token_ids + tokens).double().numpy()
        for step, token in enumerate(tokens):
            position = len(one.prompt_token_ids) + step
            best, second = numpy_race(logits[position - 1], one, tokens[:step], position)
            assert token in (best, second[0] if second[1] else best), f"{SAY_SEED}, {one.request_id}, step {step}"


def numpy_race(logits, one, output, position):
    """(winner, (second, whether it is so near that rounding may decide))."""
    p, prompt = one.sampling, one.prompt_token_ids
    x = logits.copy()
    for token in set(prompt) | set(output):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    if p.temperature:
        x = x / p.temperature
        x = x - x.max()
        order = sorted(range(VOCAB), key=lambda t: (-x[t], t))
        kept = order[: p.top_k] if p.top_k else order
        probs = np.exp(x[kept]) / np.exp(x[kept]).sum()
        before = np.cumsum(probs) - probs
        kept = [t for t, b, q in zip(kept, before, probs, strict=True) if b < p.top_p and q >= p.min_p * probs[0]]
        key = noise_key(p.seed, 0, position)
        x = np.array([x[t] - np.log(exponential(key, t)) if t in kept else -np.inf for t in range(VOCAB)])
    order = np.argsort(-x)
    return int(order[0]), (int(order[1]), x[order[0]] - x[order[1]] < 1e-3)


def exponential(key, token):
    mask = (1 << 64) - 1
    h = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
    h = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & mask
    h = ((h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53) & mask
    h ^= h >> 33
    return -np.log1p(-((h >> 32) + 0.5) / 2**32)


def test_noise_keys_of_many_equal_those_of_one(rng):
    places = [(rng.randrange(-(1 << 63), 1 << 63), rng.randrange(128), rng.randrange(1 << 20)) for _ in range(200)]
    stems = np.array([noise_stem(seed, choice) for seed, choice, _ in places], np.uint64)
    many = noise_keys(stems, np.array([p for *_, p in places], np.int64)).tolist()
    assert many == [noise_key(*place) for place in places]
    assert len(set(many)) == len(many)
    bits = np.unpackbits(np.array(many, np.uint64).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.03


def test_token_counts_grow(rng):
    prompt = [rng.randrange(50) for _ in range(20)]
    output = [rng.randrange(3000) for _ in range(500)]
    start = rng.randrange(len(output))
    counts = TokenCounts(prompt, output[:start])
    for token in output[start:]:
        counts.note(token)
    got = dict(zip(counts.tokens.tolist(), counts.counts.tolist(), strict=True))
    assert got == {t: output.count(t) for t in {*prompt, *output}}


def test_a_sequence_that_cannot_be_prepared_harms_no_other(llama, rng):
    engine = LocalEngine(llama)
    good, bad = _sampled("good", prompts(rng, 1)[0], seed=1), _sampled("bad", [5, 6], seed=1)
    expected = tokens_of(engine.run(good)["good"][0])
    engine.scheduler.add(good, 0.0)
    engine.scheduler.add(bad, 0.0)
    sequence = next(s for s in engine.scheduler.waiting if s.request is bad)
    sequence.seed = "not a number"
    plan = engine.scheduler.plan(0.0)
    with pytest.raises(SequenceFault) as caught:
        engine.runner.run(plan)
    assert caught.value.sequence_id == sequence.sequence_id
    engine.scheduler.fail(plan, OctavoError("cannot be prepared"), caught.value.sequence_id)
    assert {name: tokens_of(choice) for name, (choice,) in engine.run().items()} == {"good": expected}


def test_on_the_kernels_the_company_changes_not_one_bit(llama, rng):
    """Alone, in a crowd, in other chunks, after preemption: the same tokens and the same bits of every logprob."""
    mine = _sampled("mine", prompts(rng, 1, low=30)[0], count=20, seed=7, logprobs=5, prompt_logprobs=2, top_p=0.9)
    others = [_sampled(str(i), p, temperature=rng.random()) for i, p in enumerate(prompts(rng, 9, low=40, high=47))]
    alone = LocalEngine(llama, device_name="cpu", page_size=16).run(mine)["mine"][0]
    for shape in ({}, {"budget": rng.randint(3, 40)}, {"blocks": 6}):
        engine = LocalEngine(llama, device_name="cpu", page_size=16, **shape)
        crowded = engine.run(*others[:5], mine, *others[5:])["mine"][0]
        assert tokens_of(alone) == tokens_of(crowded), f"{SAY_SEED}, {shape}"
        assert [e.logprobs for e in alone] == [e.logprobs for e in crowded], f"{SAY_SEED}, {shape}"
        assert alone[0].prompt_logprobs == crowded[0].prompt_logprobs, f"{SAY_SEED}, {shape}"
        assert ("blocks" in shape) == (engine.scheduler.stats.preemptions > 0)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_sequence_whose_numbers_overflow_fails_alone(llama, rng, device):
    """Also while others share its steps, and when others get its blocks, where its NaNs still lie."""
    engine = LocalEngine(llama, device_name=device, page_size=16, blocks=24)
    good = prompts(rng, 6)
    asked = [request(str(i), p, temperature=1.0, seed=i, logprobs=2) for i, p in enumerate(good)]
    expected = engine.run(*asked)
    harmless = {token for p in good for token in p} | {token for (e,) in expected.values() for token in tokens_of(e)}
    poison = rng.choice(sorted(set(range(VOCAB)) - harmless))
    engine.runner._model.embed.table[poison] = rng.choice([float("nan"), float("inf"), -float("inf")])
    broken = [request(f"bad {i}", [*p[:-1], poison], n=2, temperature=1.0) for i, p in enumerate(good)]
    answers = engine.run(*(one for pair in zip(broken, asked, strict=True) for one in pair))
    for one in broken:
        for (event,) in answers[one.request_id]:
            assert (event.finish_reason, event.token_ids) == ("error", [])
            assert "is NaN or infinite" in event.error["cause"]
    again = engine.run(*asked)
    for name, ((events,), (alone,)) in {n: (again[n], expected[n]) for n in expected}.items():
        mixed = answers[name][0]
        assert tokens_of(mixed) == tokens_of(alone), SAY_SEED
        assert tokens_of(events) == tokens_of(alone), SAY_SEED
    assert engine.scheduler.blocks.num_used == 0
