"""Structured output in the engine: answers fit, and are the same in any company, after preemption, with drafts."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
import torch

from octavo.backends.base import open_device
from octavo.config import Speculation
from octavo.engine.grammar import Compiler, Masks, Place
from octavo.engine.plan import Chunk, NewSequence
from octavo.engine.sampler import Sampler
from octavo.engine.types import SamplingParams, StructuredOutputsParams
from tests.engine.tiny import VOCAB, LocalEngine, request, tokens_of
from tests.engine.tiny_words import EOS, tiny_tokenizer
from tests.matrix import SEED
from tests.schemas import in_ascii, random_regex, random_schema

SAY_SEED = f"OCTAVO_SEED={SEED}"


@pytest.fixture
def words(rng):
    return tiny_tokenizer(rng)


@pytest.fixture
def compiler(words):
    return Compiler(lambda: words, VOCAB, (EOS,))


def asked_for(name, rng, count=160, **fields):
    """Structured output of `fields` after a random prompt."""
    rest = {key: fields.pop(key) for key in ("n", "temperature", "seed", "logprobs", "top_p") if key in fields}
    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))]
    outputs = StructuredOutputsParams(**fields)
    return request(name, prompt, count, ignore_eos=False, structured_outputs=outputs, **rest)


def random_output(rng):
    """Fields of `StructuredOutputsParams`, and a check of the text."""
    match rng.choice(("json", "json", "regex", "choice", "grammar")):
        case "json":
            schema = in_ascii(random_schema(rng))
            pattern = {"disable_any_whitespace": True} if rng.random() < 0.5 else {"whitespace_pattern": r"[ \n]{0,2}"}
            return {"json": json.dumps(schema), **pattern}, lambda text: jsonschema.validate(json.loads(text), schema)
        case "regex":
            regex = random_regex(rng)
            return {"regex": regex}, lambda text: _require(re.fullmatch(regex, text), regex, text)
        case "choice":
            choices = tuple({"".join(rng.choices("ab \"\\{}'0", k=rng.randint(1, 6))) for _ in range(4)})
            return {"choice": choices}, lambda text: _require(text in choices, choices, text)
        case _:
            grammar = 'start: item ("," item){0,3}\nitem: "<" NAME ">"\nNAME: /[a-z]{1,3}/'
            regex = "<[a-z]{1,3}>(,<[a-z]{1,3}>){0,3}"
            return {"grammar": grammar}, lambda text: _require(re.fullmatch(regex, text), regex, text)


def _require(holds, *told):
    assert holds, told


def text_of(words, events):
    assert events[-1].error is None, events[-1].error
    return words.decode(tokens_of(events))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_fit(llama, rng, words, compiler, temperature):
    engine = LocalEngine(llama, compiler=compiler, blocks=900)
    outputs = [random_output(rng) for _ in range(40)]
    asked = [asked_for(str(i), rng, temperature=temperature, seed=i, **f) for i, (f, _) in enumerate(outputs)]
    answers = engine.run(*asked)
    ended = 0
    for i, (fields, check) in enumerate(outputs):
        (events,) = answers[str(i)]
        text = text_of(words, events)
        if events[-1].finish_reason == "stop":
            ended += 1
            assert tokens_of(events)[-1] == EOS
            try:
                check(text)
            except Exception as err:
                raise AssertionError(f"{SAY_SEED}, {fields}: {text!r}") from err
    assert ended >= 36, f"{SAY_SEED}: {ended} of 40 came to their end"


def test_choices_of_one_request(llama, rng, words, compiler):
    engine = LocalEngine(llama, compiler=compiler)
    answer = engine.run(asked_for("a", rng, n=3, temperature=1.5, seed=1, regex="[a-z]{4}=[0-9]{3}"))["a"]
    texts = [text_of(words, events) for events in answer]
    assert all(re.fullmatch("[a-z]{4}=[0-9]{3}", text) for text in texts), texts
    assert len(set(texts)) == 3


def test_company_preemption_and_chunks_change_not_one_bit(llama, rng, words, compiler):
    kernels = {"device_name": "cpu", "page_size": 16, "compiler": compiler}
    fields, _ = random_output(rng)
    mine = asked_for("mine", rng, 60, temperature=1.0, seed=5, logprobs=4, top_p=0.95, **fields)
    others = [
        asked_for(f"{i}", rng, 60, temperature=1.0, seed=i, **random_output(rng)[0]) if i % 2
        else request(f"{i}", [rng.randrange(3, VOCAB) for _ in range(20)], 60, temperature=1.0, seed=i, logprobs=2)
        for i in range(8)
    ]  # fmt: skip
    alone = {one.request_id: LocalEngine(llama, **kernels).run(one)[one.request_id][0] for one in (mine, *others)}
    preempted = 0
    for shape in ({}, {"budget": rng.randint(3, 40)}, {"blocks": 7}):
        engine = LocalEngine(llama, **kernels, **shape)
        crowded = engine.run(*others[:4], mine, *others[4:])
        preempted += engine.scheduler.stats.preemptions
        for name, expected in alone.items():
            told = f"{SAY_SEED}, {shape}, {name}, {fields}"
            assert tokens_of(crowded[name][0]) == tokens_of(expected), told
            assert [e.logprobs for e in crowded[name][0]] == [e.logprobs for e in expected], told
    assert preempted


def test_drafts_change_nothing(rng, words, compiler):
    """Right ones, wrong ones, such as the grammar forbids, and ends: the same tokens as one by one."""
    for _ in range(20):  # until an answer ends, which one with long texts does not
        fields = {"json": json.dumps(in_ascii(random_schema(rng))), "disable_any_whitespace": True}
        sampling = SamplingParams(temperature=1.0, logprobs=1, structured_outputs=StructuredOutputsParams(**fields))
        new = NewSequence(0, 0, rng.getrandbits(60), sampling, [5], [])
        logits = torch.from_numpy(np.random.default_rng(rng.getrandbits(32)).normal(0, 2, (100, VOCAB)).astype("f4"))
        truth = _sampled(compiler, new, logits, lambda known: [])
        if truth[-1].token_id == EOS:
            break
    assert truth[-1].token_id == EOS, SAY_SEED

    def drafts(known):
        right = [one.token_id for one in truth[known : known + 4]]
        return [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in [*right, EOS, 7]]

    assert _sampled(compiler, new, logits, drafts) == truth, f"{SAY_SEED}, {fields}"


def _sampled(compiler, new, logits, drafts_after):
    sampler = Sampler(1, VOCAB, open_device("reference", 0, 1), (EOS,), compiler)
    sampler.add(0, new)
    found, row, last = [], np.zeros(1, np.int64), new.prompt_token_ids[0]
    while len(found) < 90 and last != EOS:
        drafts = drafts_after(len(found))
        chunks = [Chunk(0, len(found), [last, *drafts], (0,), ([],), True, False, len(drafts))]
        sampler.begin(chunks, row)
        (tokens,) = sampler.sample(logits[len(found) : len(found) + len(drafts) + 1].clone(), chunks, row)
        end = next((i for i, one in enumerate(tokens) if one.token_id == EOS), len(tokens))
        found += tokens[: end + 1]
        last = found[-1].token_id
    return found


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_changes_not_one_bit(llama, rng, compiler, method):
    """With prompt lookup, and with a draft model: it guesses within the grammar, too, and being the model is right."""
    kernels = {"device_name": "cpu", "page_size": 16, "compiler": compiler}
    if method == "ngram":
        speculation = Speculation("ngram", 4, prompt_lookup_min=1, prompt_lookup_max=3)
    else:
        speculation = Speculation("draft_model", 3, model=str(llama))
    asked = [
        asked_for(str(i), rng, 70, temperature=1.0, seed=i, logprobs=2, **random_output(rng)[0]) for i in range(8)
    ]  # fmt: skip
    plain = LocalEngine(llama, **kernels).run(*asked)
    engine = LocalEngine(llama, speculation=speculation, **kernels)
    guessed = engine.run(*asked)
    for name, (expected,) in plain.items():
        (got,) = guessed[name]
        assert tokens_of(got) == tokens_of(expected), f"{SAY_SEED}, {name}"
        assert [one for e in got for one in e.logprobs] == [one for e in expected for one in e.logprobs], SAY_SEED
        assert (got[-1].finish_reason, got[-1].error) == (expected[-1].finish_reason, expected[-1].error)
    stats = engine.scheduler.stats
    if method == "draft_model":
        assert stats.draft_tokens and stats.accepted_tokens == stats.draft_tokens


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(llama, rng, words, compiler):
    """Too complex in the middle, past what admission looked at; and one that other parameters leave no token."""
    engine = LocalEngine(llama, compiler=compiler)
    complex_one = asked_for("bad", rng, regex="(x{3000}){3000}")
    good = request("good", [5, 6, 7], temperature=1.0, seed=3)
    expected = tokens_of(engine.run(good)["good"][0])
    answers = engine.run(complex_one, good)
    assert tokens_of(answers["good"][0]) == expected
    last = answers["bad"][0][-1]
    assert last.finish_reason == "error"
    assert last.error["class"] == "InvalidRequest"
    assert "grammar cannot be followed: lexer error" in last.error["cause"]


@pytest.mark.parametrize("turn", range(5))
def test_a_place_that_goes_back_and_forth_equals_a_fresh_one(rng, words, compiler, turn):
    fields, _ = random_output(rng)
    start = compiler.begin(StructuredOutputsParams(**fields))
    place = Place(start, compiler.eos_token_ids, [])
    output: list[int] = []
    for _ in range(60):
        bits = np.unpackbits(np.frombuffer(place.matcher().compute_bitmask(), np.uint8), bitorder="little")
        fresh = Place(start, compiler.eos_token_ids, output)
        told = f"{SAY_SEED}, {fields}, {output}"
        if place.open:
            assert place.matcher().compute_bitmask() == fresh.matcher().compute_bitmask(), told
        if output and (not place.open or rng.random() < 0.4):
            for _ in range(rng.randint(1, len(output))):
                place.undo()
                output.pop()
            assert place.fault is None
        else:
            token = int(rng.choice(np.flatnonzero(bits)))
            place.note(token)
            output.append(token)


def test_masks_know_the_sampling_rows_only(rng, words, compiler):
    """A row without a grammar has no mask; drafts have one each; ids without a token are never allowed."""
    masks = Masks(compiler)
    for row, fields in ((4, {"regex": "[ab]{3}"}), (6, {})):
        outputs = StructuredOutputsParams(**fields) if fields else None
        masks.add(row, NewSequence(row, 0, 1, SamplingParams(structured_outputs=outputs), [3], []))
    a, b = words.encode("a")[0], words.encode("b")[0]
    chunks = [_chunk(6, [3], 0), _chunk(4, [3, a, b], 2)]
    masks.begin(list(zip(chunks, [6, 4], strict=True)))
    found = masks.finish()
    assert sorted(found) == [1, 2, 3]
    for bits in found.values():
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        texts = {words.token_text(int(token)) for token in allowed}
        assert {"a", "b"} <= texts
        assert all(re.fullmatch("[ab]{1,3}", text) for text in texts)
    masks.begin(list(zip(chunks, [6, 4], strict=True)))
    masks.begin([(chunks[0], 6)])
    assert masks.finish() == {}


def _chunk(sequence_id, tokens, drafts):
    return Chunk(sequence_id, 0, tokens, (0,), ([],), True, False, drafts)
