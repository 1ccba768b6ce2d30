"""Long texts: refused without being tokenized when they cannot fit, and never in the way of short ones."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from octavo.engine.text_work import LONG_AT_ONCE, LONG_CHARACTERS, SHOWN_AT_LEAST, TextWork
from octavo.errors import InvalidRequest
from octavo.text.from_gguf import byte_characters
from octavo.text.shrinkage import COMPOSED, LOSSY, shrinkage
from octavo.text.tokenizer import load_tokenizer
from tests.matrix import SEED
from tests.real_models import REAL_MODELS, path_of
from tests.unit.text_samples import random_text

RNG = random.Random(f"{SEED}/text_work")
VOCAB = {character: id for id, character in enumerate(byte_characters())}


def byte_level(normalizer=None, pre=(), vocab=VOCAB, added=(), **options) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(dict(vocab), [], **options))
    made.pre_tokenizer = pre_tokenizers.Sequence([*pre, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_tokens(list(added))
    return made


SPLIT = [pre_tokenizers.Split(Regex(r"\s+"), behavior) for behavior in ("isolated", "removed")]
NESTED = normalizers.Sequence([normalizers.Sequence([normalizers.NFC()]), normalizers.Replace(" ", "▁")])


@pytest.mark.parametrize(("encoder", "expected"), [
    (byte_level(), 1), (byte_level(pre=SPLIT[:1]), 1), (byte_level(normalizers.Prepend("▁")), 1),
    (byte_level(NESTED), COMPOSED), (byte_level(normalizers.NFD()), COMPOSED),
    (byte_level(pre=SPLIT[1:]), LOSSY), (byte_level(normalizers.Lowercase()), LOSSY),
    (byte_level(normalizers.Replace("  ", " ")), LOSSY), (byte_level(normalizers.Replace(Regex(" +"), "▁▁")), LOSSY),
    (byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])), LOSSY),
    (byte_level(added=[AddedToken("<m>", lstrip=True)]), LOSSY),
    (byte_level(vocab={character: id for character, id in VOCAB.items() if character != "a"}), LOSSY),
    (byte_level(byte_fallback=True), LOSSY),
    (tokenizers.Tokenizer(models.BPE({"a": 0}, [], unk_token="a", fuse_unk=True)), LOSSY),
    (tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a")), LOSSY),
])  # fmt: skip
def test_only_what_keeps_every_byte_is_trusted(encoder, expected):
    assert shrinkage(encoder) == expected


@pytest.mark.parametrize("text", ["e\u0301", "\u212a", "\u1112\u1161\u11ab", "\U0002f800", "α\u0313\u0300\u0345"])
def test_composing_shrinks_no_further_than_we_say(text):
    for normalizer in (normalizers.NFC(), normalizers.NFD()):
        assert len(text.encode()) <= COMPOSED * len(normalizer.normalize_str(text).encode())


@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_text_over_the_bound_never_fits(name):
    tokenizer = load_tokenizer(path_of(name))
    longest = max((tokenizer.token_text(id) for id in range(tokenizer.vocab_size)), key=len)
    for text in [longest * 9, " " * 1000, *(random_text(RNG) for _ in range(50))]:
        assert len(text.encode()) <= tokenizer.longest_text(len(tokenizer.encode(text))), (SEED, text)
    assert shrinkage(tokenizer._encoder) == 1
    assert tokenizer.longest_text(100) < 100 * 1024


class Tokenizer:
    """One token a byte; a text of x waits for `go`."""

    def __init__(self) -> None:
        self.go, self.seen = threading.Event(), []

    def encode(self, text, add_special_tokens=True):
        self.seen.append(text)
        if text.startswith("x"):
            assert self.go.wait(30)
        return list(text.encode())

    def longest_text(self, tokens):
        return tokens


@pytest.fixture
def tokenizer():
    made = Tokenizer()
    yield made
    made.go.set()


async def test_short_texts_do_not_wait_for_long_ones(tokenizer):
    work = TextWork(tokenizer)
    long = [asyncio.ensure_future(work.encode("x" * (LONG_CHARACTERS + 1), True, 10**9, "prompt")) for _ in range(50)]
    messages = [{"role": "user", "content": "x" * (LONG_CHARACTERS + 1)}]
    long.append(asyncio.ensure_future(work.render(lambda: "x", messages, False, 10**9)))
    await asyncio.sleep(0.2)
    assert len(tokenizer.seen) == LONG_AT_ONCE
    start = time.monotonic()
    for count in (1, 3000, LONG_CHARACTERS):
        assert len(await work.encode("y" * count, True, 10**9, "prompt")) == count
    assert await work.render(lambda: "z", [{"role": "user", "content": "y"}], False, 9) == ("z", list(b"z"))
    assert time.monotonic() - start < 5
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    tokenizer.go.set()
    assert len(await work.encode("y" * (LONG_CHARACTERS + 1), True, 10**9, "prompt")) > LONG_CHARACTERS
    begun = [text for text in tokenizer.seen if text.startswith("x")]
    assert len(begun) == LONG_AT_ONCE, "work for callers that had left was begun"
    work.close()


async def test_what_cannot_fit_is_refused_unseen(tokenizer):
    work, size = TextWork(tokenizer), LONG_CHARACTERS + 1
    with pytest.raises(InvalidRequest, match=f"prompt has {size} bytes of text; limit: {size - 1} tokens") as caught:
        await work.encode("x" * size, True, size - 1, "prompt")
    assert caught.value.param == "prompt"
    for content in ("ж" * size, [{"type": "text", "text": "ж" * size}]):
        with pytest.raises(InvalidRequest, match="messages has"):
            await work.render(
                pytest.fail, [{"role": "user", "content": content}], False, 2 * size // SHOWN_AT_LEAST - 1
            )
    with pytest.raises(InvalidRequest, match="messages has"):
        await work.render(lambda: "x" * size, [{"role": "user", "content": "y"}], False, size - 1)
    assert tokenizer.seen == []
    work.close()


def test_encoding_a_long_text_lets_other_threads_run():
    tokenizer = load_tokenizer(path_of("smollm2"))
    text = "a" * (1 << 20)
    busy = threading.Thread(target=tokenizer.encode, args=(text,))
    start = last = time.monotonic()
    busy.start()
    longest, running = 0.0, True
    while running:
        running = busy.is_alive()
        time.sleep(0.001)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert longest < (last - start) / 2, f"stood still for {longest:.3f} s of {last - start:.3f} s"
