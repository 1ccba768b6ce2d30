"""What is refused of a model before any process starts."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.config import EngineArgs
from octavo.engine.model_text import prepare
from octavo.errors import BadModelFile, ModelNotFound, UsageError
from tests.engine import tiny
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/model-text")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_llama(tmp_path_factory.mktemp("llama"), SEED)


@pytest.fixture
def tokenizer(tmp_path):
    """Writes one with that many ids, the last of them added tokens; returns its folder."""

    def write(size: int, added: int = 0) -> str:
        letters = [chr(ord("a") + i) for i in range(size - added)]
        encoder = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
        encoder.pre_tokenizer, encoder.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        encoder.add_special_tokens([f"<{i}>" for i in range(added)])
        (tmp_path / "tokenizer.json").write_text(encoder.to_str(), "utf-8")
        return str(tmp_path)

    return write


def args(model, tokenizer, **fields):
    return EngineArgs(model=str(model), tokenizer=tokenizer, **fields)


@pytest.mark.parametrize("added", [0, 1, 3])
def test_a_tokenizer_of_another_vocabulary(model, tokenizer, added):
    size = tiny.VOCAB + RNG.randint(1, 3000)
    with pytest.raises(BadModelFile, match=f"has {size} token ids; limit: the model knows {tiny.VOCAB};"):
        prepare(args(model, tokenizer(size, added)), None)


@pytest.mark.parametrize("size", [tiny.VOCAB, tiny.VOCAB - RNG.randint(1, tiny.VOCAB // 2)])
def test_padded_rows_are_nothing_to_tell(model, tokenizer, caplog, size):
    with caplog.at_level(logging.WARNING):
        assert prepare(args(model, tokenizer(size, 2)), None).tokenizer.vocab_size == size
    assert caplog.text == ""


def test_a_tokenizer_with_far_fewer_tokens_is_told(model, tokenizer, caplog):
    prepare(args(model, tokenizer(tiny.VOCAB // 2 - 1)), None)
    (record,) = caplog.records
    assert f"has 79 token ids, and the model knows {tiny.VOCAB}" in record.getMessage()


@pytest.mark.parametrize("ranks", [3, 24, 64])
def test_ranks_that_cannot_share_the_model(model, tokenizer, ranks):
    with pytest.raises(UsageError, match=f"--tensor-parallel-size {ranks} does not divide .*fix: use 1 or 2$"):
        prepare(args(model, tokenizer(100), tensor_parallel_size=ranks), None)


def test_a_draft_model_must_have_the_same_tokens(model, tokenizer, tmp_path_factory):
    draft = tiny.write_llama(tmp_path_factory.mktemp("draft"), SEED + 1, hidden_size=32, num_hidden_layers=1)
    folder = tokenizer(tiny.VOCAB, 3)
    asked = {"speculative_config": {"model": str(draft), "num_speculative_tokens": 2}}
    with pytest.raises(BadModelFile, match="tokenizer"):
        prepare(args(model, folder, **asked), None)
    text = (Path(folder) / "tokenizer.json").read_text("utf-8")
    (draft / "tokenizer.json").write_text(text, "utf-8")
    assert prepare(args(model, folder, **asked), None).config.speculative_config.model == str(draft)
    (draft / "tokenizer.json").write_text(text.replace('"e":4', '"E":4').replace('"e": 4', '"E": 4'), "utf-8")
    with pytest.raises(UsageError, match=r"other tokens than .*; limit: the same, but token 4 is 'E', not 'e'"):
        prepare(args(model, folder, **asked), None)
    asked["speculative_config"]["model"] = "no-such-model"
    with pytest.raises(ModelNotFound, match="no-such-model"):
        prepare(args(model, folder, **asked), None)
