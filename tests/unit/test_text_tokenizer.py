"""Tokenizers built from GGUF metadata and from tokenizer.json, against independent ones and other programs' answers."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path

import pytest
import regex

from octavo.errors import BadModelFile, InvalidRequest
from octavo.formats.gguf import read_gguf
from octavo.text import from_gguf
from octavo.text.pretokenizers import pre_tokenizer
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.matrix import FULL, SEED
from tests.real_models import REAL_MODELS, path_of
from tests.unit.text_samples import random_text

GOLDEN = Path(__file__).parent.parent / "golden"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN_WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module", params=REAL_MODELS)
def model(request) -> tuple[str, Path]:
    return request.param, path_of(request.param)


@pytest.fixture(scope="module")
def tokenizer(model) -> Tokenizer:
    return load_tokenizer(model[1])


class NaiveTokenizer:
    """Byte-level BPE as its paper has it: words, then the best-ranked pair, again and again."""

    def __init__(self, metadata, words):
        tokens = metadata["tokenizer.ggml.tokens"]
        types = metadata["tokenizer.ggml.token_type"]
        pairs = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        self.ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self.ids = {token: id for id, token in enumerate(tokens)}
        whole = sorted((t for t, kind in zip(tokens, types, strict=True) if kind in (3, 4)), key=len, reverse=True)
        self.whole = regex.compile("(" + "|".join(map(regex.escape, whole)) + ")")
        self.words = [regex.compile(pattern) for pattern in words]
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = (b for b in range(256) if b not in shown)
        self.alphabet = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}

    def encode(self, text):
        out = []
        for i, part in enumerate(self.whole.split(text)):
            out += [self.ids[part]] if i % 2 else self.encode_plain(part)
        return out

    def encode_plain(self, text):
        pieces = [text]
        for pattern in self.words:
            pieces = [piece for whole in pieces for piece in isolate(pattern, whole)]
        return [id for piece in pieces for id in self.merge([self.alphabet[b] for b in piece.encode()])]

    def merge(self, symbols):
        while pairs := [(self.ranks[p], i) for i, p in enumerate(itertools.pairwise(symbols)) if p in self.ranks]:
            _, at = min(pairs)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[symbol] for symbol in symbols]


def isolate(pattern, text):
    at = 0
    for match in pattern.finditer(text):
        if match.start() > at:
            yield text[at : match.start()]
        if match.group():
            yield match.group()
        at = match.end()
    if at < len(text):
        yield text[at:]


def test_golden_prompts(model, tokenizer):
    entries = json.loads((GOLDEN / f"{model[0]}.json").read_text("utf-8"))
    assert len(entries) >= 20
    for entry in entries:
        ids = tokenizer.encode(entry["text"], add_special_tokens=False)
        assert ids == entry["prompt_token_ids"], entry["id"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == entry["text"], entry["id"]
        said = tokenizer.decode(entry["greedy_token_ids"], skip_special_tokens=False)
        assert said == entry["greedy_text"], entry["id"]


def test_random_text_against_a_naive_tokenizer(model, tokenizer):
    words = {"smollm2": [r"\p{N}", GPT2_WORDS], "qwen-coder": [QWEN_WORDS]}[model[0]]
    naive = NaiveTokenizer(read_gguf(model[1]).metadata, words)
    rng = random.Random(SEED)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    texts = [random_text(rng, specials) for _ in range(20000 if FULL else 3000)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        assert ids == naive.encode(text), f"{text!r} (OCTAVO_SEED={SEED})"
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text, f"{text!r} (OCTAVO_SEED={SEED})"
    assert [tokenizer.encode(text, add_special_tokens=False) for text in texts[:100]] == tokenizer.encode_batch(
        texts[:100], add_special_tokens=False
    )


def test_random_tokens_decode_as_the_library_does(model, tokenizer):
    rng = random.Random(SEED)
    from tokenizers import decoders

    library = tokenizer._encoder
    library.decoder = decoders.ByteLevel()
    types = read_gguf(model[1]).metadata["tokenizer.ggml.token_type"]
    usable = [id for id, kind in enumerate(types) if kind != from_gguf.UNUSED]
    for _ in range(1000):
        ids = rng.choices(usable, k=rng.randrange(1, 12))
        for skip in (False, True):
            expected = library.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected, f"{ids} (OCTAVO_SEED={SEED})"


def test_facts_of_the_default_model(smollm2_path):
    started = time.process_time()
    tokenizer = load_tokenizer(smollm2_path)
    assert time.process_time() - started < 0.5
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.special_ids == frozenset(range(17))
    assert "<|im_start|>" in tokenizer.chat_template
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi", add_special_tokens=False), "this model adds none"


@pytest.mark.parametrize(
    "text", ["a" * 300_000, " " * 300_000 + "x", "1" * 300_000, "人工" * 100_000, "\n" * 300_000, "!?" * 150_000]
)  # fmt: skip
def test_long_text_takes_no_quadratic_time(smollm2_path, text):
    tokenizer = load_tokenizer(smollm2_path)
    started = time.process_time()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert time.process_time() - started < 8


WORDS = "Hello World, I'm HE'LL x12345  y\n\n z ñÑandú"


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", "Hello| World|,| I|'m| HE|'|LL| x|12345| | y|\n\n| z| ñÑandú"),
        ("smollm", "Hello| World|,| I|'m| HE|'|LL| x|1|2|3|4|5| | y|\n\n| z| ñÑandú"),
        ("llama-bpe", "Hello| World|,| I|'m| HE|'LL| x|123|45| | y|\n\n| z| ñÑandú"),
        ("qwen2", "Hello| World|,| I|'m| HE|'LL| x|1|2|3|4|5| | y|\n\n| z| ñÑandú"),
        ("default", "Hello| World|,| I|'|m| HE|'|LL| x|123|45| | y|\n\n| z| ñÑandú"),
        ("tekken", "Hello| World|,| I|'m| HE|'LL| x|1|2|3|4|5| | y|\n\n| z| ñ|Ñandú"),
        ("gpt-4o", "Hello| World|,| I'm| HE'LL| x|123|45| | y|\n\n| z| ñ|Ñandú"),
    ],
)
def test_pre_tokenizers(name, pieces):
    text = WORDS
    cut = [text[start:end] for _, (start, end) in pre_tokenizer(name).build().pre_tokenize_str(text)]
    assert "|".join(cut) == pieces


def metadata(**changes):
    """The least a byte-level GGUF tokenizer needs: all bytes, and two merges."""
    alphabet = list(from_gguf.byte_characters())
    keys = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": ["<s>", "</s>", *alphabet, "he", "hel", "<extra>", "<unused>"],
        "merges": ["h e", "he l"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    keys["token_type"] = [3, 3, *[1] * (len(alphabet) + 2), 4, 5]
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **changes}.items() if value is not None}


def test_token_types_of_gguf():
    """User-defined tokens are whole but not special; unused ones are text like any other."""
    tokenizer = from_gguf.from_metadata(metadata())
    unused = tokenizer.vocab_size - 1
    ids = tokenizer.encode("<s>hel<extra><unused>", add_special_tokens=False)
    assert ids[:3] == [0, 259, 260]
    assert unused not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hel<extra><unused>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hel<extra><unused>"
    assert tokenizer.token_bytes(unused) == b""
    assert tokenizer.special_ids == {0, 1}


@pytest.mark.parametrize(
    ("changes", "framed"),
    [
        ({}, (True, False)),
        ({"pre": "qwen2"}, (False, False)),
        ({"pre": "qwen2", "add_bos_token": True}, (True, False)),
        ({"add_bos_token": False, "add_eos_token": True}, (False, True)),
    ],
)
def test_tokens_added_by_rule(changes, framed):
    tokenizer = from_gguf.from_metadata(metadata(**changes))
    bare = tokenizer.encode("hel", add_special_tokens=False)
    assert bare == [259]
    assert tokenizer.encode("hel") == [0] * framed[0] + bare + [1] * framed[1]
    assert tokenizer.encode_batch(["hel"] * 3) == [tokenizer.encode("hel")] * 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": "martian"}, r"'martian'.*unknown.*llama-bpe.*qwen2"),
        ({"model": "rwkv"}, r"'rwkv'.*gpt2 or llama"),
        ({"model": None}, r"tokenizer\.ggml\.model"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"merges": None}, r"tokenizer\.ggml\.merges"),
        ({"merges": ["h e", "x yz"]}, "merges and tokens do not fit"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"eos_token_id": 100_000}, "eos_token_id is 100000"),
        ({"bos_token_id": None, "add_bos_token": True}, "no tokenizer.ggml.bos_token_id"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores"),
        ({"model": "llama", "scores": [0.0]}, "scores has 1 entries"),
        ({"model": "llama", "scores": [0.0] * 262, "remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    ],
)
def test_metadata_that_cannot_be_used(changes, says):
    with pytest.raises(BadModelFile, match=says) as caught:
        from_gguf.from_metadata(metadata(**changes))
    assert "\n" not in str(caught.value)


def test_half_a_surrogate_pair_and_ids_out_of_range():
    tokenizer = from_gguf.from_metadata(metadata())
    with pytest.raises(InvalidRequest, match=r"U\+D83D.* at character 2"):
        tokenizer.encode("ab\ud83d")
    assert tokenizer.decode([259, tokenizer.vocab_size, 259]) == "helhel", "padded logits can be sampled"
    assert tokenizer.token_bytes(-1) == b""


def test_named_templates_of_gguf():
    named = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    tokenizer = from_gguf.from_metadata({**metadata(), **named})
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("plain", "with tools")


_G = "tokenizer.ggml."
BYTE_LEVEL = {
    f"{_G}model": "gpt2", f"{_G}tokens": ["a", "b", "ab", "<s>"], f"{_G}token_type": [1, 1, 1, 3],
    f"{_G}merges": ["a b"], f"{_G}bos_token_id": 3,
}  # fmt: skip
SPM = {**BYTE_LEVEL, f"{_G}model": "llama", f"{_G}scores": [0.0, 0.0, -1.0, 0.0]}
OTHERS = [f"{_G}pre", f"{_G}eos_token_id", "tokenizer.chat_template", "tokenizer.chat_templates"]
VALUES = (5, "x", 1.5, True, [], [5], ["x"], [[1]], [1, 2, 3, 4], ["a"] * 4, [1.5] * 4, 10**12, -1, None)


@pytest.mark.parametrize("metadata", [BYTE_LEVEL, SPM], ids=["gpt2", "llama"])
def test_metadata_of_another_type_is_refused_or_understood(metadata):
    from_gguf.from_metadata(metadata)
    for key in (*metadata, *OTHERS):
        for value in VALUES:
            try:
                from_gguf.from_metadata({**metadata, key: value})
            except BadModelFile:
                continue
            except Exception as error:
                pytest.fail(f"{key} {value!r}: {error!r}")
