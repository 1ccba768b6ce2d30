"""Guesses change no answer: tokens, and on the kernels every bit of every logprob, are those of plain decoding."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from octavo.backends.kv import FullAttention, KVGroup, SlidingWindow, group_layers
from octavo.config import Speculation
from octavo.engine.client import EngineClient
from octavo.engine.draft_model import place_layers
from octavo.engine.drafting import FIRST_REST, Pace
from octavo.engine.grammar import Compiler
from octavo.engine.ngram import TokenIndex
from octavo.engine.sizing import size_kv
from octavo.engine.types import StructuredOutputsParams
from octavo.engine.worker import choose_device
from octavo.errors import UsageError
from octavo.models.checkpoint import open_checkpoint
from tests.engine.tiny import VOCAB, LocalEngine, config_for, request, tokens_of, write_llama
from tests.engine.tiny_words import EOS, tiny_tokenizer
from tests.matrix import SEED, sample

SAY_SEED = f"OCTAVO_SEED={SEED}"
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("small"), SEED + 1, **SMALL)


def ngram(length=4, **fields):
    return Speculation("ngram", length, **{"prompt_lookup_min": 1, "prompt_lookup_max": 3, **fields})


def drafts_of(folder, length=4, **fields):
    return Speculation("draft_model", length, model=str(folder), **fields)


PARAMS = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.4},
    "sampled": {"temperature": 0.8},
    "filters": {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "negative penalties": {"temperature": 0.5, "frequency_penalty": -1.5},
    "logprobs": {"temperature": 0.7, "logprobs": 4, "prompt_logprobs": 1},
    "listed logprobs": {"logprobs": None, "logprob_token_ids": (5, 6, 7)},
    "bias": {"temperature": 0.6, "logit_bias": {9: 4.0, 11: -100.0}},
    "allowed": {"temperature": 0.6, "allowed_token_ids": tuple(range(20, 36))},
    "choices": {"temperature": 0.4, "n": 2},
    "length": {"max_tokens": 7, "temperature": 0.2},
}


def requests(rng, answers=None):
    """One of every kind, on prompts that repeat themselves. With plain `answers`, also what stops or bans by tokens."""
    asked = []
    for i, (name, fields) in enumerate(PARAMS.items()):
        piece = [rng.randrange(20, 40) for _ in range(rng.randint(2, 9))]
        prompt = (piece * 8)[: rng.randint(10, 40)]
        asked.append(request(name, prompt, **{"count": 24, "seed": 1000 + i, "logprobs": 2, **fields}))
    if answers:
        said = tokens_of(answers["sampled"][0])
        plain = next(r for r in asked if r.request_id == "sampled")
        stop, word = said[rng.randint(5, 20)], said[9:11]
        for name, fields in (
            ("stop", {"stop_token_ids": (stop,)}),
            ("not before", {"stop_token_ids": (stop,), "min_tokens": 15}),
            ("bad words", {"bad_word_ids": (tuple(word), (said[12],))}),
            ("thinking", {"thinking_token_budget": 6, "thinking_marks": (said[2], 50)}),
        ):
            asked.append(request(name, plain.prompt_token_ids, 24, seed=1002, temperature=0.8, logprobs=1, **fields))
    return asked


def same_requests(seed, answers=None):
    return requests(random.Random(seed), answers)


def content(events):
    logprobs = [one for event in events for one in event.logprobs or ()]
    last = events[-1]
    return tokens_of(events), logprobs, events[0].prompt_logprobs, last.finish_reason, last.stop_reason


def contents(answers):
    return {name: [content(events) for events in choices] for name, choices in answers.items()}


CASES = [(method, length) for method in ("ngram", "small", "same") for length in range(1, 9)]
SHAPES = {
    "roomy": {}, "preempted": {"blocks": 10, "page_size": 16}, "chunked": {"budget": 23},
    "tiny pages": {"page_size": 1}, "one at a time": {"seqs": 1},
}  # fmt: skip


def speculation(method, length, llama, small_llama):
    return ngram(length) if method == "ngram" else drafts_of(llama if method == "same" else small_llama, length)


@pytest.fixture(scope="module")
def plain(llama):
    """By device: requests of every kind, and their answers by plain decoding."""
    found = {}
    for device in ("cpu", "reference"):
        shape = {"device_name": device, "page_size": 16}
        answers = LocalEngine(llama, **shape).run(*same_requests(SEED))
        asked = same_requests(SEED, answers)
        found[device] = asked, contents(LocalEngine(llama, **shape).run(*asked))
    return found


@pytest.mark.parametrize(("method", "length"), sample(CASES, 7))
def test_on_the_kernels_not_one_bit_differs_from_plain_decoding(method, length, llama, small_llama, plain):
    asked, expected = plain["cpu"]
    rng = random.Random(f"{SEED}/{method}/{length}")
    name = rng.choice([n for n in SHAPES if n != "tiny pages"])
    engine = LocalEngine(
        llama, device_name="cpu", speculation=speculation(method, length, llama, small_llama),
        **{"page_size": 16, **SHAPES[name]},
    )  # fmt: skip
    got = contents(engine.run(*asked))
    for one in expected:
        assert got[one] == expected[one], f"{SAY_SEED}, {method} {length}, {name}: {one}"
    stats = engine.scheduler.stats
    assert stats.draft_tokens > 0 and (stats.preemptions > 0) == (name == "preempted")
    if method == "same":
        assert stats.accepted_tokens == stats.draft_tokens, f"{SAY_SEED}: the guesses were drawn with other noise"


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_on_the_reference_the_tokens_are_the_same(name, llama, small_llama, plain):
    """A matrix product there may add in another order for several rows, so the last bits of logprobs may differ."""
    asked, expected = plain["reference"]
    rng = random.Random(f"{SEED}/{name}")
    method, length = rng.choice(CASES)
    spec = speculation(method, length, llama, small_llama)
    got = contents(LocalEngine(llama, speculation=spec, **SHAPES[name]).run(*asked))
    for one in expected:
        assert [c[0] for c in got[one]] == [c[0] for c in expected[one]], f"{SAY_SEED}, {method} {length}: {one}"


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_draft_model_equal_to_the_model_is_always_right(kv_cache_dtype, llama):
    """Also with a quantized KV cache, which it has for itself, and with sliding windows."""
    asked = same_requests(SEED)
    shape = {"device_name": "cpu", "page_size": 16, "kv_cache_dtype": kv_cache_dtype}
    engine = LocalEngine(llama, speculation=drafts_of(llama, 5), **shape)
    got = contents(engine.run(*asked))
    assert got == contents(LocalEngine(llama, **shape).run(*asked)), SAY_SEED
    stats = engine.scheduler.stats
    assert 0 < stats.accepted_tokens == stats.draft_tokens, SAY_SEED
    assert stats.steps < stats.generation_tokens / 12


def test_what_becomes_of_blocks_becomes_of_the_draft_models(llama, plain):
    """Shared, copied, swapped to the host and back: a draft model that equals the model is still always right."""
    asked, expected = plain["cpu"]
    shape = {"device_name": "cpu", "page_size": 16, "blocks": 10, "host_slots": 200, "enable_prefix_caching": True}
    engine = LocalEngine(llama, speculation=drafts_of(llama, 4), **shape)
    engine.scheduler.tiers.speed.host.note(1e15, 1e-9)  # moving costs nothing, so what is preempted is swapped
    for turn in range(2):
        assert contents(engine.run(*asked)) == expected, f"{SAY_SEED}, turn {turn}"
    stats = engine.scheduler.stats
    assert stats.preemptions_swapped > 0 and stats.prefix_hits > 0
    assert 0 < stats.accepted_tokens == stats.draft_tokens, SAY_SEED


def test_sliding_windows(mistral, llama, small_llama):
    asked = same_requests(SEED)
    shape = {"device_name": "cpu", "page_size": 16, "budget": 19}
    expected = contents(LocalEngine(mistral, **shape).run(*asked))
    for spec in (ngram(), drafts_of(mistral)):
        engine = LocalEngine(mistral, speculation=spec, **shape)
        assert contents(engine.run(*asked)) == expected, SAY_SEED
    assert engine.scheduler.stats.accepted_tokens == engine.scheduler.stats.draft_tokens > 0
    with pytest.raises(UsageError, match="looks back at all tokens; limit: 9 tokens"):
        LocalEngine(mistral, speculation=drafts_of(small_llama), **shape)


def test_structured_output_with_a_draft_model(llama, small_llama, rng):
    """Its guesses keep to the grammar as well: one that equals the model is always right."""
    compiler = Compiler(lambda: tiny_tokenizer(random.Random(SEED)), VOCAB, (EOS,))
    shape = {"device_name": "cpu", "page_size": 16, "compiler": compiler}
    asked = [
        request(str(i), [rng.randrange(3, VOCAB) for _ in range(9)], 40, ignore_eos=False, temperature=1.0, seed=i,
                logprobs=2, structured_outputs=StructuredOutputsParams(**fields), **more)
        for i, (fields, more) in enumerate([
            ({"regex": "[a-z]{4}(=[0-9]{3},[a-d]{2}){1,5}"}, {}), ({"choice": ("yes, yes", "no")}, {"n": 2}),
            ({"json": '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'}, {}),
            ({"regex": "(ab|cd){6}[0-9]{9}"}, {"frequency_penalty": 0.5, "allowed_token_ids": tuple(range(EOS, 150))}),
        ])
    ]  # fmt: skip
    expected = contents(LocalEngine(llama, **shape).run(*asked))
    for spec in (ngram(), drafts_of(small_llama), drafts_of(llama, 6)):
        engine = LocalEngine(llama, speculation=spec, **shape)
        assert contents(engine.run(*asked)) == expected, f"{SAY_SEED}, {spec}"
    assert engine.scheduler.stats.accepted_tokens == engine.scheduler.stats.draft_tokens > 0, SAY_SEED


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("rows", [VOCAB - 20, VOCAB + 20])
def test_a_draft_model_whose_vocabulary_is_padded_otherwise(rows, device, llama, plain, tmp_path):
    asked, expected = plain[device]
    draft = write_llama(tmp_path, SEED + 2, vocab_size=rows, **SMALL)
    got = contents(LocalEngine(llama, speculation=drafts_of(draft, 3), device_name=device, page_size=16).run(*asked))
    for one in expected:
        assert [c[0] for c in got[one]] == [c[0] for c in expected[one]], f"{SAY_SEED}: {one}"


def test_layers_of_a_draft_model_use_blocks_that_last_long_enough():
    full, near, far = FullAttention(1, 8), SlidingWindow(1, 8, 10), SlidingWindow(1, 8, 20)
    placed = place_layers([KVGroup(near, (0, 2)), KVGroup(full, (1,))], [far, full])
    assert [(p.group, p.layers) for p in placed] == [(0, (0, 2)), (1, (1,))]
    with pytest.raises(UsageError, match="looks back 20"):
        place_layers([KVGroup(far, (0,))], [near])


def test_no_guesses_for_a_large_batch(llama):
    asked = [request(str(i), [30 + i] * 9, 12) for i in range(6)]
    engine = LocalEngine(llama, speculation=ngram(disable_by_batch_size=5))
    engine.run(*asked)
    assert engine.scheduler.stats.drafts == 0
    engine.run(*asked[:5])
    assert engine.scheduler.stats.drafts > 0


def test_guesses_pause_where_they_fail_and_come_back():
    pace = Pace(8, limit=10_000)
    made, num_tokens = [], 100
    for _ in range(400):
        count = pace.count(num_tokens)
        made.append(count)
        pace.judge(count, 0)
        num_tokens += 1
    assert made[: 5 + FIRST_REST] == [8, 4, 2, 1, *[0] * FIRST_REST, 1]
    assert sum(made) < 25, "a sequence whose guesses all fail costs little"
    while not (count := pace.count(num_tokens)):
        pace.judge(0, 0)
    for expected in (1, 2, 4, 8, 8):
        assert pace.count(num_tokens) == expected
        pace.judge(expected, expected)
    pace.judge(8, 3)
    assert pace.count(num_tokens) == 4
    assert [pace.count(n) for n in (9_997, 9_998, 9_999)] == [2, 1, 0], "the last token needs no guess"


def test_prompt_lookup_finds_what_a_plain_search_finds(rng):
    for _ in range(60):
        least, letters = rng.randint(1, 4), rng.randint(2, 5)
        most = least + rng.randint(0, 3)
        tokens = [rng.randrange(letters) for _ in range(rng.randint(0, 60))]
        cut = rng.randint(0, len(tokens))
        index = TokenIndex(least, most)
        index.extend(tokens[:cut])
        index.extend(tokens[cut:])
        count = rng.randint(1, 9)
        assert index.guess(count) == plain_search(tokens, least, most, count), f"{SAY_SEED}: {tokens}, {least}, {most}"


def plain_search(tokens, least, most, count):
    for length in range(most, least - 1, -1):
        if length > len(tokens):
            continue
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                text = list(tokens)
                for place in range(end, end + count):
                    text.append(text[place])
                return text[len(tokens) :]
    return []


def test_prompt_lookup_costs_the_same_however_long_the_text(rng):
    """In places looked at, the worst case being one token over and over."""
    index = TokenIndex(2, 64)
    index.extend([rng.randrange(3, VOCAB)] * 50_000)
    looked = []
    matched = index._match
    index._match = lambda end: looked.append(end) or matched(end)
    assert len(index.guess(8)) == 8
    assert len(looked) == 1, "the latest place has a full match"


async def test_several_ranks(llama, small_llama, rng):
    """The draft model is whole on rank 0; the others see its guesses in the plans."""
    asked = same_requests(SEED)
    expected = LocalEngine(llama).run(*asked)
    method = rng.choice(["small", "same"])
    config = config_for(llama, tensor_parallel_size=2, threads=1)
    config = replace(config, speculative_config=speculation(method, 3, llama, small_llama))
    client = await EngineClient.start(config)
    try:
        answers = await asyncio.gather(*(collect(client, one) for one in asked if one.sampling.n == 1))
        for events in answers:
            name = events[0].request_id
            assert tokens_of(events) == tokens_of(expected[name][0]), f"{SAY_SEED}, {method}: {name}"
        assert client.facts.num_speculative_tokens == 3
        assert client.stats.draft_tokens > 0
        assert client.stats.accepted_tokens > 0 or method == "small", "a stranger to the model may never be right"
    finally:
        await client.shutdown()


async def collect(client, one):
    return [event async for batch in client.generate(one) for event in batch]


def test_the_draft_models_keys_and_values_count_in_the_memory(llama, small_llama):
    """A block then holds what both keep, and each sequence has spare blocks; all of it within the same budget."""
    device, dtype = choose_device(config_for(llama), 0)
    groups, draft = (open_checkpoint(f).spec.kv_specs() for f in (llama, small_llama))
    config = replace(config_for(llama), speculative_config=drafts_of(small_llama, 6))
    own = {"config": config, "device": device, "groups": group_layers(groups), "dtype": dtype, "reason": "test"}
    budget = 400_000
    plain = size_kv(**own, budget=budget)
    drafting = size_kv(**own, budget=budget, draft=group_layers(draft))
    own_page, draft_page = (sum(device.kv_bytes_per_page(s, 4, dtype) for s in specs) for specs in (groups, draft))
    spare = config.max_num_seqs * 2 * draft_page
    assert plain.kv_cache_bytes == plain.layout.num_blocks[0] * own_page
    assert drafting.kv_cache_bytes == drafting.layout.num_blocks[0] * (own_page + draft_page) + spare
    assert budget - own_page - draft_page < drafting.kv_cache_bytes <= budget
