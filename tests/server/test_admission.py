"""Limits that are checked before the engine hears of a request, and where defaults come from."""

from __future__ import annotations

import random

import pytest

from octavo.engine import admission
from octavo.engine.types import SamplingParams
from octavo.errors import BadModelFile, InvalidRequest
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/admission")


def test_defaults_come_from_the_models_generation_config():
    config = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 99, "do_sample": True, "top_k": None}
    assert admission.default_params(config, 100) == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 99}
    assert admission.default_params({}, 100) == {}


@pytest.mark.parametrize(("name", "value"), [("temperature", "hot"), ("top_p", 7), ("max_new_tokens", -1)])
def test_a_model_with_impossible_defaults_is_named(name, value):
    with pytest.raises(BadModelFile, match="generation_config"):
        admission.default_params({name: value}, 100)


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", "1"), ("temperature", True), ("n", 1.5), ("stop", ["a", 1]), ("stop_token_ids", ["1"]),
    ("seed", "x"), ("ignore_eos", 1), ("max_tokens", 2.5), ("skip_special_tokens", None),
])  # fmt: skip
def test_values_of_another_type_are_named(name, value):
    with pytest.raises(InvalidRequest, match=f"^{name} is ") as caught:
        admission.typed(SamplingParams(**{name: value}))
    assert caught.value.param == name


def test_right_types_pass_unchanged():
    params = SamplingParams(n=2, temperature=1, stop=["a"], stop_token_ids=[3], seed=5, max_tokens=None)
    assert admission.typed(params) == params


def test_max_tokens_is_filled_in_capped_or_refused():
    context = RNG.randint(2, 1000)
    prompt = RNG.randint(1, context - 1)
    room = context - prompt
    note = f"context {context}, prompt {prompt}, OCTAVO_SEED={SEED}"
    for wanted in (None, 1, room, room + 1, room + 1000):
        params = SamplingParams(max_tokens=wanted)
        expected = room if wanted is None else min(wanted, room)
        assert admission.fit_max_tokens(params, prompt, context, asked=False).max_tokens == expected, note
        if wanted is not None and wanted > room:
            with pytest.raises(InvalidRequest, match=f"{wanted}.*{context}"):
                admission.fit_max_tokens(params, prompt, context, asked=True)
        else:
            assert admission.fit_max_tokens(params, prompt, context, asked=True).max_tokens == expected, note


@pytest.mark.parametrize(("ids", "says"), [([], "no token"), ([5, -1], "-1"), ([50], "0 to 49"), ([1] * 20, "20")])
def test_prompts_that_cannot_be(ids, says):
    with pytest.raises(InvalidRequest, match=says):
        admission.check_prompt(ids, 50, 20, "prompt")
    admission.check_prompt([0, 49] + [1] * 17, 50, 20, "prompt")


def test_errors_speak_the_callers_names():
    error = InvalidRequest("max_tokens is 0", limit="1", fix="set max_tokens within it", param="max_tokens")
    renamed = admission.renamed(error, {"max_tokens": "max_completion_tokens"})
    assert renamed.param == "max_completion_tokens"
    assert str(renamed) == "max_completion_tokens is 0; limit: 1; fix: set max_completion_tokens within it"
    assert admission.renamed(error, {}) is error


@pytest.mark.parametrize(("field", "count"), [
    ("allowed_token_ids", 0), ("allowed_token_ids", 51), ("logprob_token_ids", 0), ("stop", 65),
])  # fmt: skip
def test_what_holds_too_few_or_too_many_is_counted_in_words(field, count):
    values = ["x"] * count if field == "stop" else [1] * count
    unit = "strings" if field == "stop" else "token ids"
    with pytest.raises(InvalidRequest, match=f"^{field} holds {count} {unit}; limit: "):
        SamplingParams(**{field: values}).verify(50, 20)
