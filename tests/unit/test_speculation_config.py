"""--speculative-config: vLLM's JSON, every key of it checked, and how older servers were told the same."""

from __future__ import annotations

import json

import pytest

from octavo.config import EngineArgs, EngineConfig, ModelFacts, Speculation, parse_speculation, resolve
from octavo.errors import UsageError
from octavo.tools.old_flags import translate
from tests.unit.test_cli import parse

FACTS = ModelFacts("m", 100, 10, ())


def test_vllms_json_is_understood_and_travels():
    given = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}'
    expected = Speculation("ngram", 4, prompt_lookup_min=2, prompt_lookup_max=5)
    for name in ("-sc", "--speculative-config"):
        engine_args, _ = parse("m", name, given)
        config = resolve(engine_args, FACTS)
        assert config.speculative_config == expected
        assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert resolve(EngineArgs("m", speculative_config=json.loads(given)), FACTS).speculative_config == expected
    assert resolve(EngineArgs("m"), FACTS).speculative_config is None


@pytest.mark.parametrize(("given", "expected"), [
    ({"model": "a", "num_speculative_tokens": 3}, Speculation("draft_model", 3, model="a")),
    ({"model": "a", "num_speculative_tokens": 32, "method": "draft_model", "draft_tensor_parallel_size": 1,
      "disable_by_batch_size": 9}, Speculation("draft_model", 32, model="a", disable_by_batch_size=9)),
    ({"model": "[ngram]", "num_speculative_tokens": 1}, Speculation("ngram", 1)),
    ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "model": None},
     Speculation("ngram", 2, prompt_lookup_min=3, prompt_lookup_max=3)),
    ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1},
     Speculation("ngram", 2, prompt_lookup_min=1, prompt_lookup_max=1)),
])  # fmt: skip
def test_defaults(given, expected):
    assert parse_speculation(given) == expected


@pytest.mark.parametrize(("given", "said"), [
    ("{", "'{' is no JSON; limit: an object"),
    ("[" * 100_000, "is no JSON"),
    ("[1]", "[1] is no object"),
    ({"method": "eagle", "num_speculative_tokens": 2}, "method is 'eagle'; limit: ngram or draft_model"),
    ({"method": 3, "num_speculative_tokens": 2}, "method is 3; limit: a text"),
    ({"num_speculative_tokens": 2}, "method is missing; limit: ngram or draft_model"),
    ({"method": "ngram"}, "num_speculative_tokens is missing; limit: 1 to 32"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0; limit: 1 to 32"),
    ({"method": "ngram", "num_speculative_tokens": 33}, "num_speculative_tokens is 33; limit: 1 to 32"),
    ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens is True; limit: 1 to 32"),
    ({"method": "ngram", "num_speculative_tokens": "4"}, "num_speculative_tokens is '4'; limit: 1 to 32"),
    ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 6, "prompt_lookup_max": 5},
     "prompt_lookup_min is 6; limit: prompt_lookup_max, 5"),
    ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 65}, "prompt_lookup_max is 65; limit: 1 to"),
    ({"method": "ngram", "num_speculative_tokens": 4, "model": "x"}, "model is 'x'; limit: method ngram uses none"),
    ({"method": "draft_model", "num_speculative_tokens": 4}, "model is missing"),
    ({"model": "", "num_speculative_tokens": 4}, "model is ''; limit: a text"),
    ({"model": "x", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 2}, "size is 2; limit: 1 to 1"),
    ({"model": "x", "num_speculative_tokens": 4, "acceptance": 1}, "unknown key 'acceptance'; limit: method, num_spec"),
])  # fmt: skip
def test_what_cannot_be_is_named_with_its_limit(given, said):
    given_as = [given] if isinstance(given, str) else [given, json.dumps(given)]
    for one in given_as:
        with pytest.raises(UsageError) as caught:
            EngineArgs("m", speculative_config=one).verify()
        assert str(caught.value).startswith("--speculative-config: ") and said in str(caught.value)
        assert caught.value.param == "speculative_config" and "\n" not in str(caught.value)


def test_a_loop_that_plans_ahead_is_refused_not_ignored():
    given = {"method": "ngram", "num_speculative_tokens": 2}
    for wanted in (None, False):
        assert resolve(EngineArgs("m", speculative_config=given, async_scheduling=wanted), FACTS).speculative_config
    with pytest.raises(UsageError, match="--async-scheduling cannot be had together with --speculative-config"):
        resolve(EngineArgs("m", speculative_config=given, async_scheduling=True), FACTS)


def test_older_flags_become_the_json():
    old = ["--speculative-model", "[ngram]", "--num-speculative-tokens=5", "--ngram-prompt-lookup-max", "4"]
    translation = translate(["--model", "m", *old])
    engine_args, _ = parse(*translation.argv)
    assert resolve(engine_args, FACTS).speculative_config == Speculation(
        "ngram", 5, prompt_lookup_min=4, prompt_lookup_max=4
    )
    assert len(translation.warnings) == 3
    draft = translate(["--model", "m", "--spec-model", "s", "--spec-tokens", "2", "--spec-method", "draft_model"])
    assert resolve(parse(*draft.argv)[0], FACTS).speculative_config == Speculation("draft_model", 2, model="s")
