"""Our tokenizers under llguidance: whatever a mask allows, token by token, the text fits."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import jsonschema
import numpy as np
import psutil
import pytest
import tokenizers
from llguidance import LLMatcher
from tokenizers import decoders, models, pre_tokenizers

from octavo.text import from_gguf, from_json
from octavo.text.grammar import from_choices, from_regex, from_schema, is_lark, limits, to_lark, words_of
from octavo.text.grammar_check import GrammarCheck, TooMuch
from octavo.text.tokenizer import load_tokenizer
from tests.matrix import SEED
from tests.schemas import random_regex, random_schema
from tests.unit.test_text_sentencepiece import library, metadata  # noqa: F401

RNG = random.Random(SEED)
SAY_SEED = f"OCTAVO_SEED={SEED}"
WITH_PATH = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
EXTRA = 37
"""ids that a model's padded vocabulary has and its tokenizer does not"""


@pytest.fixture(scope="module")
def gguf_bpe(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def gguf_sentencepiece(library):  # noqa: F811
    return from_gguf.from_metadata(metadata(library))


@pytest.fixture(scope="module")
def json_bpe():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("{", '"'), ('"', ":"), ("a", "b"), ("ab", "c"), ("t", "rue"), ("r", "ue"), ("u", "e")]
    merges.sort(key=lambda pair: len("".join(pair)))
    tokens = ["<eos>", *alphabet, *("".join(pair) for pair in merges), "<tag>"]
    encoder = tokenizers.Tokenizer(models.BPE({text: id for id, text in enumerate(tokens)}, merges))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(["<eos>"])
    encoder.add_tokens(["<tag>"])
    return from_json.build(encoder, json.loads(encoder.to_str()), {"eos_token": "<eos>"})


KINDS = ["gguf_bpe", "gguf_sentencepiece", "json_bpe"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def words(tokenizer):
    return words_of(tokenizer, tokenizer.vocab_size + EXTRA, [tokenizer.eos_token_id])


def allowed(matcher):
    return np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))


def walk(tokenizer, words, grammar, rng, steps=300):
    """A text of tokens drawn evenly from what is allowed, its tokens, and whether it came to an end."""
    matcher = LLMatcher(words, grammar, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    for _ in range(steps):
        choices = allowed(matcher)
        token = int(rng.choice(choices))
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(ids, skip_special_tokens=False), ids, True
        assert token < tokenizer.vocab_size, "an id without a token"
        assert token not in tokenizer.special_ids
        assert matcher.try_consume_tokens([token]) == 1, (tokenizer.token_text(token), matcher.get_error())
        ids.append(token)
    return tokenizer.decode(ids), ids, False


def text_of(tokenizer, ids):
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_texts_of_random_schemas_fit(tokenizer, words):
    ended = 0
    for _ in range(60):
        schema = random_schema(RNG)
        _, ids, end = walk(tokenizer, words, from_schema(schema, False, None), RNG)
        ended += end
        if end:
            text = text_of(tokenizer, ids)
            try:
                jsonschema.validate(json.loads(text), schema)
            except Exception as err:
                raise AssertionError(f"{SAY_SEED}, {schema}: {text!r}") from err
    assert ended >= 55, SAY_SEED


def test_texts_of_random_regexes_match(tokenizer, words):
    for _ in range(60):
        regex = random_regex(RNG)
        _, ids, end = walk(tokenizer, words, from_regex(regex), RNG)
        assert end, f"{SAY_SEED}, {regex}"
        assert re.fullmatch(regex, text_of(tokenizer, ids)), f"{SAY_SEED}, {regex}: {text_of(tokenizer, ids)!r}"


def test_choices_are_kept_to_the_letter(tokenizer, words):
    characters = "ab \"\\'/\n\t\x00\x1f{}()[]*+?.|<>%#é日🎉"
    for _ in range(40):
        choices = ["".join(RNG.choices(characters, k=RNG.randint(1, 8))) for _ in range(RNG.randint(1, 4))]
        _, ids, end = walk(tokenizer, words, from_choices(choices), RNG)
        assert end and text_of(tokenizer, ids) in choices, f"{SAY_SEED}, {choices}"


def test_what_is_forced_is_cut_as_the_model_was_taught(gguf_bpe):
    """And a text that spells a special token is not that token."""
    words = words_of(gguf_bpe, gguf_bpe.vocab_size, [gguf_bpe.eos_token_id])
    text = 'The answer is "forty-two", of course.'
    _, ids, end = walk(gguf_bpe, words, from_choices([text]), RNG)
    assert end and ids == gguf_bpe.encode(text, False)
    spelled = gguf_bpe.token_text(gguf_bpe.eos_token_id)
    _, ids, end = walk(gguf_bpe, words, from_choices([f"a{spelled}b"]), RNG)
    assert end and text_of(gguf_bpe, ids) == f"a{spelled}b" and gguf_bpe.special_ids.isdisjoint(ids)


TABLE = """
root ::= "select " column " from " tab-le
column ::= "one" | "two"  # names
tab-le ::= "t" [^a-z\\n]
"""
GBNF = {
    'root ::= "a" [0-9]+ ("x" | "y")?': r"a[0-9]+[xy]?",
    'root ::= item ("," item)*\nitem ::= [a-c]{2}': r"[a-c]{2}(,[a-c]{2})*",
    TABLE: r"select (one|two) from t[^a-z\n]",
}


@pytest.mark.parametrize(("gbnf", "regex"), GBNF.items())
def test_gbnf(json_bpe, gbnf, regex):
    assert not is_lark(gbnf)
    words = words_of(json_bpe, json_bpe.vocab_size, [0])
    texts = [walk(json_bpe, words, to_lark(gbnf), RNG, 60) for _ in range(20)]
    assert sum(end for *_, end in texts) > 5
    for _, ids, end in texts:
        raw = b"".join(map(json_bpe.token_bytes, ids))
        assert not end or re.fullmatch(regex, raw.decode()), (SAY_SEED, raw)


@pytest.mark.parametrize("gbnf", ["start ::= 5", 'root ::= "a', "root ::= [a", 'root ::= "a" (', "root ::= b", "x ::="])
def test_gbnf_that_is_none(gbnf):
    with pytest.raises(ValueError, match=r"\w"):
        to_lark(gbnf)


@pytest.fixture
def check():
    made = GrammarCheck({0: "<eos>", 9: "<think>"}, 1000)
    yield made
    made.close()


def test_the_checker_knows_special_tokens_and_says_what_is_wrong(check):
    assert check.ask('start: <think> "a" <[500]>', False) == {"grammar": 'start: <think> "a" <[500]>'}
    assert "unknown special token" in check.ask("start: <other>", False)["error"]
    assert "unclosed group" in check.ask(from_regex("(a"), False)["error"]
    assert "root" in check.ask('a ::= "b"', True)["error"]
    assert check.ask('root ::= "b"', True)["grammar"].startswith("%llguidance")


@pytest.mark.parametrize("greedy", [
    {"patternProperties": {f"^a{i}_": {} for i in range(1500)}}, {"type": "integer", "multipleOf": 9_999_991},
], ids=["time", "memory"])  # fmt: skip
def test_the_checker_ends_what_takes_too_much_and_works_on(check, greedy, monkeypatch):
    monkeypatch.setattr("octavo.text.grammar_check.TIMEOUT_S", 0.7)
    with pytest.raises(TooMuch):
        check.ask(from_schema(greedy, True, None), False)
    monkeypatch.undo()
    assert "grammar" in check.ask(from_regex("a+"), False)


def test_closing_does_not_wait_for_a_grammar(check):
    greedy = from_schema({"patternProperties": {f"^a{i}_": {} for i in range(1500)}}, True, None)
    check.ask("start: /a/", False)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(check.ask, greedy, False)
        time.sleep(0.2)
        begin = time.monotonic()
        check.close()
        assert time.monotonic() - begin < 1.5
        assert isinstance(asked.exception(), TooMuch)


@pytest.mark.parametrize("nested", [
    "start: " + "(" * 50_000 + '"a"' + ")" * 50_000, from_regex("(" * 50_000 + "a" + ")" * 50_000),
    from_regex("(" * 200 + "a" + ")?{2}" * 200),
])  # fmt: skip
def test_deep_grammars_harm_nobody(check, nested):
    with suppress(TooMuch):
        assert "error" in check.ask(nested, False)
    assert "grammar" in check.ask(from_regex("a+"), False)


PARENT = """
import sys
from octavo.text.grammar_check import GrammarCheck
check = GrammarCheck({}, 300)
check.ask("start: /a/", False)
print(check._process.pid, flush=True)
sys.stdin.read()
"""


def test_the_checker_ends_with_a_killed_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=PIPE, stdout=PIPE, env=WITH_PATH) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert child.wait(10) is None or not child.is_running()
