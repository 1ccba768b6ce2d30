"""Paths and files that a user names: whatever is wrong with them is one line of a typed error."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.config import EngineArgs
from octavo.engine.model_text import prepare
from octavo.errors import BadModelFile, ModelNotFound, UsageError
from octavo.server.args import MAX_CONFIG_BYTES, MAX_TEMPLATE_BYTES
from tests.matrix import SEED
from tests.models_fixtures import random_model, save
from tests.unit.test_cli import octavo, parse

RNG = random.Random(f"{SEED}/paths")
LONG = RNG.randint(256, 8000)
IMPOSSIBLE = {
    "long": "m" * LONG, "long-absolute": f"/{'m' * LONG}", "deep": "/".join("m" * 5000), "null": "mo\0del",
    "surrogate": "mo\udcffdel", "lone-surrogate": "\ud800", "no-such-user": "~no-such-user-here/m",
}  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(random_model("llama", 1), folder, torch.float32, False)
    return folder


@pytest.mark.parametrize("field", ["model", "tokenizer", "download_dir"])
@pytest.mark.parametrize("path", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_path_that_cannot_be_is_one_line(field, path, model_folder):
    args = {"model": "smollm2" if field == "download_dir" else str(model_folder), field: path}
    with pytest.raises(UsageError) as caught:
        prepare(EngineArgs(**args), None)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 1000, f"{LONG} characters, OCTAVO_SEED={SEED}"
    assert said.isprintable()


@pytest.mark.parametrize("flag", ["--config", "--chat-template"])
@pytest.mark.parametrize("path", [*IMPOSSIBLE.values(), "/", "/dev/zero"], ids=[*IMPOSSIBLE, "folder", "endless"])
def test_files_of_flags_that_cannot_be_read(flag, path):
    with pytest.raises(UsageError) as caught:
        parse("m", flag, path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_long_name_ends_a_command_with_2(command):
    result = octavo(command, IMPOSSIBLE["long"], "--tokenizer" if command == "run" else "--log-level=error", "x")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr


def test_a_short_name_that_is_unknown_is_still_not_found():
    with pytest.raises(ModelNotFound, match="no model is called"):
        prepare(EngineArgs("".join(RNG.choices("abcdef", k=9))), None)


@pytest.mark.parametrize(("flag", "limit"), [("--config", MAX_CONFIG_BYTES), ("--chat-template", MAX_TEMPLATE_BYTES)])
def test_the_limit_of_a_file_is_exact(tmp_path, flag, limit):
    file = tmp_path / "file"
    file.write_text("seed: 1\n".ljust(limit, "#"))
    assert parse("m", flag, str(file))
    file.write_text("seed: 1\n".ljust(limit + 1, "#"))
    with pytest.raises(UsageError, match=f"limit: {limit} bytes"):
        parse("m", flag, str(file))


BAD_CONFIGS = {
    "list": "max-num-seqs: [1, 2]", "mapping": "served-model-name: {a: b}", "nested": "api-key: [[a], b]",
    "nothing": "seed:", "empty": 'api-key: ""', "brackets": "a: " + "[" * (MAX_CONFIG_BYTES - 10),
    "binary": "\0", "tag": "seed: !!python/object/apply:os.getpid []", "fraction": "max-num-seqs: 2.5",
    "switch": "enable-log-requests: perhaps", "flag-of-no-switch": "max-num-seqs: true",
    "bomb": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nseed: [*c, *c]",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_config_that_says_what_cannot_be(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    result = octavo("serve", "m", "--config", str(tmp_path / "c.yaml"))
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert len(result.stderr) < 1000


def test_values_of_a_config_are_taken_as_they_are_written(tmp_path):
    """YAML would read a key of digits that begins with 0 as an octal number."""
    (tmp_path / "c.yaml").write_text("api-key: [0123, 1_0, yes]\nserved-model-name: 1.50\n")
    engine, server = parse("m", "--config", str(tmp_path / "c.yaml"))
    assert server.api_keys == ("0123", "1_0", "yes")
    assert engine.served_model_name == ("1.50",)


def test_an_endless_tokenizer(model_folder, monkeypatch):
    limit = RNG.randint(1000, 100_000)
    monkeypatch.setattr("octavo.text.from_json._MAX_BYTES", limit)
    with pytest.raises(BadModelFile, match=f"^/dev/zero is too large; limit: {limit} bytes"):
        prepare(EngineArgs(str(model_folder), tokenizer="/dev/zero"), None)
