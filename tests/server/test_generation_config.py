"""Where sampling defaults come from: the model, nowhere, or a folder."""

from __future__ import annotations

import json
import random

import pytest

from octavo.config import EngineArgs
from octavo.engine.model_text import prepare
from octavo.errors import BadModelFile, UsageError
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/model_text")


def prepared(model, source):
    return prepare(EngineArgs(str(model), generation_config=str(source)), None)


def test_a_folder_gives_sampling_defaults_and_further_ends_of_sequence(smollm2_path, tmp_path):
    temperature, token = round(RNG.uniform(0.1, 2), 3), RNG.randrange(10, 49152)
    settings = {"temperature": temperature, "top_k": None, "max_new_tokens": 7, "eos_token_id": [token]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    own, none, other = (prepared(smollm2_path, source) for source in ("auto", "vllm", tmp_path))
    assert other.default_params == {"temperature": temperature, "max_tokens": 7}, f"OCTAVO_SEED={SEED}"
    assert set(other.config.eos_token_ids) == {token, *own.config.eos_token_ids}
    assert none.default_params == {}
    assert none.config.eos_token_ids == own.config.eos_token_ids


@pytest.mark.parametrize(("settings", "says"), [
    ({"temperature": -1}, "temperature is -1"), ({"eos_token_id": 1 << 20}, "end-of-sequence token 1048576"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
])  # fmt: skip
def test_a_folder_with_impossible_settings_is_refused(smollm2_path, tmp_path, settings, says):
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(BadModelFile, match=says):
        prepared(smollm2_path, tmp_path)


def test_a_folder_without_the_file_is_no_source(smollm2_path, tmp_path):
    for source in (tmp_path, tmp_path / "nowhere", "none"):
        with pytest.raises(UsageError, match=r"--generation-config .*generation_config.json.*auto"):
            prepared(smollm2_path, source)
