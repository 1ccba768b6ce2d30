"""Sampling parameters as they are admitted: types, ranges, and what of them needs the tokenizer."""

from __future__ import annotations

import random

import msgspec
import pytest

from octavo.engine import admission
from octavo.engine.text_work import Cut
from octavo.engine.types import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from octavo.errors import InvalidRequest
from octavo.text import from_gguf
from octavo.text.tokenizer import load_tokenizer
from tests.matrix import SEED
from tests.unit.test_text_tokenizer import metadata

NOTE = f"OCTAVO_SEED={SEED}"
VOCAB = 1000
FULL = SamplingParams(
    n=2, best_of=3, logit_bias={"5": -1.5, 7: 2}, allowed_token_ids=[1, 2], bad_words=["a"], stop="x", min_tokens=3,
    stop_token_ids=[5], thinking_token_budget=9, truncate_prompt_tokens=-1, truncation_side="right",
    repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=2), logprob_token_ids=[4, 4],
    output_kind=RequestOutputKind.DELTA, stream_interval=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


def test_parameters_survive_admission_and_the_wire():
    typed = admission.typed(FULL)
    typed.verify(VOCAB, 20)
    assert typed == FULL
    assert typed.logit_bias == {5: -1.5, 7: 2.0}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(typed), type=SamplingParams) == typed


@pytest.mark.parametrize(("name", "value"), [
    ("logit_bias", {"x": 1}), ("logit_bias", {5: "1"}), ("logit_bias", [5]), ("allowed_token_ids", ["5"]),
    ("allowed_token_ids", 5), ("bad_words", [5]), ("min_tokens", 1.5), ("min_tokens", True), ("best_of", "2"),
    ("repetition_detection", {"zork": 1}), ("repetition_detection", 5), ("detokenize", 1), ("truncation_side", 5),
    ("output_kind", "delta"), ("output_kind", 7), ("stream_interval", 2.5), ("logprob_token_ids", "5"),
    ("thinking_token_budget", 1.5), ("truncate_prompt_tokens", "all"),
])  # fmt: skip
def test_a_wrong_type_names_its_parameter(name, value):
    with pytest.raises(InvalidRequest) as caught:
        admission.typed(SamplingParams(**{name: value}))
    assert caught.value.param == name
    assert len(str(caught.value)) < 300


def test_a_dict_does_for_repetition_detection():
    params = admission.typed(SamplingParams(repetition_detection={"max_pattern_size": 4, "min_count": 2}))
    assert params.repetition_detection == RepetitionDetectionParams(max_pattern_size=4, min_count=2)


def test_minus_one_is_vllms_unset():
    plain = SamplingParams(top_k=-1, seed=-1, thinking_token_budget=-1)
    assert (plain.top_k, plain.seed, plain.thinking_token_budget) == (0, None, None)


@pytest.mark.parametrize(("asked", "used"), [(0, 0), (1e-300, 0.01), (0.009, 0.01), (0.01, 0.01), (0.5, 0.5)])
def test_temperatures_next_to_zero_are_raised(asked, used):
    assert SamplingParams(temperature=asked).temperature == used


@pytest.mark.parametrize(("asked", "most", "right"), [
    (-1, -1, True), (VOCAB, -1, True), (VOCAB + 1, -1, False), (-1, 20, False), (20, 20, True), (21, 20, False),
    (-2, -1, False), (-1, VOCAB, True), (0, 0, True),
])  # fmt: skip
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_how_many_logprobs(name, asked, most, right):
    params = SamplingParams(**{name: asked})
    if not right:
        with pytest.raises(InvalidRequest, match=f"{name} is {asked}"):
            params.verify(VOCAB, most)
        return
    params.verify(VOCAB, most)
    count = params.num_logprobs(VOCAB) if name == "logprobs" else params.num_prompt_logprobs(VOCAB)
    assert count == (VOCAB if asked == -1 else asked)


def test_many_logprobs_of_many_tokens_are_refused():
    for name, prompt, answer in (("prompt_logprobs", 5000, 1), ("logprobs", 1, 5000)):
        params = SamplingParams(**{name: -1}, max_tokens=answer)
        with pytest.raises(InvalidRequest, match=f"{name} asks for 1000 logprobs at each of 5000"):
            admission.check_logprobs(params, prompt, VOCAB)
        admission.check_logprobs(SamplingParams(**{name: 20}, max_tokens=1 << 20), 1 << 20, VOCAB)
        admission.check_logprobs(SamplingParams(**{name: -1}, max_tokens=4000), 4000, VOCAB)


def test_min_tokens_must_fit_what_max_tokens_becomes():
    params = SamplingParams(min_tokens=50, max_tokens=None)
    assert admission.fit_max_tokens(params, 10, 60, True).max_tokens == 50
    with pytest.raises(InvalidRequest, match="min_tokens is 50"):
        admission.fit_max_tokens(params, 11, 60, True)


def test_bad_words_become_the_tokens_that_spell_them(tokenizer):
    rng = random.Random(f"{SEED}/bad-words")
    words = [" ".join(rng.sample(["tea", "Pot", "naïve", "日本", "x1", "😀", "the", "quick"], rng.randint(1, 3)))
             for _ in range(40)]  # fmt: skip
    found = admission.with_token_ids(SamplingParams(bad_words=[*words, "  tea"]), tokenizer).bad_word_ids
    expected = []
    for word in [*words, "tea"]:
        plain, spaced = (tuple(tokenizer.encode(text, False)) for text in (word, f" {word}"))
        expected += [plain, spaced]
    assert list(found) == expected, NOTE
    assert {tokenizer.decode(word).strip() for word in found} == {*words, "tea"}


def test_bad_words_have_bounds(tokenizer):
    for words, said in ((["x y " * 1000], "tokens"), (["a"] * 65, "130 token sequences"), (["a" * 4097], "4097"),
                        ([" "], "no token")):  # fmt: skip
        with pytest.raises(InvalidRequest, match=said) as caught:
            admission.with_token_ids(SamplingParams(bad_words=words), tokenizer)
        assert caught.value.param == "bad_words"


def test_thinking_marks_are_the_models(tokenizer):
    asked = SamplingParams(thinking_token_budget=5)
    with pytest.raises(InvalidRequest, match="this model has no tokens for thinking"):
        admission.with_token_ids(asked, tokenizer)
    plain = metadata()
    names = random.Random(SEED).choice(admission.THINKING_MARKS)
    tokens, types = plain["tokenizer.ggml.tokens"], plain["tokenizer.ggml.token_type"]
    thinker = from_gguf.from_metadata(metadata(tokens=[*tokens, *names], token_type=[*types, 4, 4]))
    count = len(tokens)
    assert admission.with_token_ids(asked, thinker).thinking_marks == (count, count + 1)
    assert admission.with_token_ids(SamplingParams(), thinker).thinking_marks is None
    both = SamplingParams(thinking_token_budget=5, structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidRequest, match="with structured output"):
        admission.with_token_ids(both, thinker)


def test_what_the_caller_says_of_token_ids_does_not_count(tokenizer):
    meddled = SamplingParams(bad_word_ids=((5,),), thinking_marks=(1, 2))
    assert admission.with_token_ids(meddled, tokenizer) == SamplingParams()


def test_best_of_is_more_choices_to_the_engine():
    few = admission.for_engine(SamplingParams(n=2, best_of=5))
    assert (few.n, few.best_of, few.logprobs) == (5, None, 0)
    assert admission.for_engine(SamplingParams(n=2, best_of=5, logprobs=3)).logprobs == 3
    assert admission.for_engine(SamplingParams(n=2, best_of=2)) == SamplingParams(n=2)


def test_cuts():
    rng = random.Random(f"{SEED}/cuts")
    for _ in range(500):
        ids = [rng.randrange(100) for _ in range(rng.randint(1, 30))]
        keep, side, prefix = rng.randint(1, 35), rng.choice(["left", "right"]), rng.choice([0, 1, 2])
        got = Cut(keep, side).of(list(ids), prefix)
        assert len(got) == min(keep, len(ids)), NOTE
        if len(ids) <= keep:
            assert got == ids
        elif side == "right" or keep <= prefix:
            assert got == (ids[:keep] if side == "right" else ids[-keep:]), NOTE
        else:
            assert got[:prefix] == ids[:prefix] and got[prefix:] == ids[len(ids) - (keep - prefix) :], NOTE


def test_how_much_a_prompt_keeps():
    def keep(**fields):
        return admission.cut_of(SamplingParams(**fields), 100)

    assert keep() is None
    assert keep(truncate_prompt_tokens=7, truncation_side="right") == Cut(7, "right")
    assert keep(truncate_prompt_tokens=-1, max_tokens=30) == Cut(70, "left")
    assert keep(truncate_prompt_tokens=-1, max_tokens=None) == Cut(99, "left")
    for wrong in (0, 101, -2):
        with pytest.raises(InvalidRequest, match=f"truncate_prompt_tokens is {wrong}"):
            keep(truncate_prompt_tokens=wrong)
