"""SentencePiece BPE as Llama 2's GGUF files carry it, against the sentencepiece library itself."""

from __future__ import annotations

import io
import random

import pytest
import sentencepiece

from octavo.text import from_gguf
from octavo.text.detokenizer import Detokenizer
from tests.matrix import SEED
from tests.unit.text_samples import random_text

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog does not mind it at all",
    "hello world, this is a small corpus that repeats itself, and repeats itself again",
    "in the beginning there were numbers: 1 2 3 10 100 1000 and then there was 2026",
    "der Hund läuft über die Straße; le garçon mange une pomme; 人工智能 是 人工 的 智能",
    "def function(value):    return value + value        if value else None",
] * 20


@pytest.fixture(scope="module")
def library():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=600, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True, split_digits=True,
        allow_whitespace_only_pieces=True, user_defined_symbols=["<tool>"], control_symbols=["<ctl>"],
        hard_vocab_limit=False, num_threads=1, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata(library, **changes):
    ids = range(library.get_piece_size())
    kinds = [
        from_gguf.UNKNOWN if library.is_unknown(i)
        else from_gguf.CONTROL if library.is_control(i)
        else from_gguf.BYTE if library.is_byte(i)
        else from_gguf.USER_DEFINED if library.id_to_piece(i) == "<tool>"
        else 1
        for i in ids
    ]  # fmt: skip
    keys = {
        "model": "llama", "tokens": [library.id_to_piece(i) for i in ids],
        "scores": [library.get_score(i) for i in ids], "token_type": kinds,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **changes}.items()}


def test_random_text(library):
    tokenizer = from_gguf.from_metadata(metadata(library))
    rng = random.Random(SEED)
    words = " ".join(CORPUS[:5]).split()
    for _ in range(2000):
        text = random_text(rng) + " ".join(rng.choices(words, k=rng.randrange(8))) + random_text(rng, longest=4)
        text = text.replace("\x00", "").replace("▁", "")
        expected = library.encode(text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text, f"{text!r} (OCTAVO_SEED={SEED})"
        if text:
            assert ids == expected, f"{text!r} (OCTAVO_SEED={SEED})"


def test_first_space_and_special_tokens(library):
    tokenizer = from_gguf.from_metadata(metadata(library))
    hello = library.encode("hello")
    assert tokenizer.encode("hello") == [1, *hello]
    assert tokenizer.encode("<s>hello</s>hello", add_special_tokens=False) == [1, *hello, 2, *hello]
    assert tokenizer.decode([1, *hello, 2]) == "hello"
    assert tokenizer.decode([1, *hello], skip_special_tokens=False) == "<s> hello"
    assert tokenizer.token_bytes(hello[0]).startswith(b" ")
    bare = from_gguf.from_metadata(metadata(library, add_space_prefix=False, add_bos_token=False))
    assert bare.decode(bare.encode(" hello")) == " hello"
    assert bare.encode(" hello") == hello


def test_bytes_of_tokens(library):
    tokenizer = from_gguf.from_metadata(metadata(library))
    byte = library.piece_to_id("<0xF0>")
    assert tokenizer.token_bytes(byte) == b"\xf0"
    assert tokenizer.token_text(byte) == "\ufffd"
    ids = tokenizer.encode("🐉", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " 🐉".encode()


def test_streaming_keeps_the_space_after_a_prompt(library):
    tokenizer = from_gguf.from_metadata(metadata(library))
    prompt, answer = tokenizer.encode("hello"), library.encode("world again")
    after = Detokenizer(tokenizer, prompt_token_ids=prompt)
    assert after.push(answer) + after.flush() == " world again"
    alone = Detokenizer(tokenizer, prompt_token_ids=[1])
    assert alone.push(answer) + alone.flush() == "world again" == tokenizer.decode([1, *answer])
