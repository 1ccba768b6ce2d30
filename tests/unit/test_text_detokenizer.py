"""Streams of tokens to text: the pieces are exactly decode(all), and stop strings are found wherever tokens are cut."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.matrix import SEED
from tests.unit.test_text_tokenizer import metadata

BYTES = 2
"""in the small tokenizer, ids 2 to 257 are single bytes, in this order"""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def small() -> Tokenizer:
    from octavo.text import from_gguf

    return from_gguf.from_metadata(metadata())


SMALL = small()
BYTE_ID = {SMALL.token_bytes(id): id for id in range(BYTES, BYTES + 256)}


def spelled(raw: bytes) -> list[int]:
    return [BYTE_ID[bytes([byte])] for byte in raw]


def cut(ids, cuts):
    """`ids` in runs of the lengths in `cuts`, the last run taking the rest."""
    for length in cuts:
        yield ids[:length]
        ids = ids[length:]
    yield ids


CUTS = st.lists(st.integers(0, 5), max_size=40)
BROKEN = st.lists(
    st.one_of(
        st.text(max_size=4).map(lambda text: text.encode("utf-8", "replace")),
        st.sampled_from(["🍜", "👩‍💻", "مرحبا", "人工", "é"]).map(str.encode),
        st.sampled_from([b"\xf0", b"\x9f\x8d", b"\xc3", b"\xff", b"\xe4\xba", b"\xed\xa0\x80", b"\x80", b"\xf4\x90"]),
    ),
    max_size=12,
).map(b"".join)


@given(raw=BROKEN, cuts=CUTS, skip=st.booleans(), specials=st.lists(st.integers(0, 30), max_size=3))
@settings(deadline=None)
def test_pieces_are_what_decode_gives(raw, cuts, skip, specials):
    ids = spelled(raw)
    for at in specials:
        ids.insert(min(at, len(ids)), at % 2)
    stream = Detokenizer(SMALL, skip_special_tokens=skip)
    pieces = [stream.push(run) for run in cut(ids, cuts)] + [stream.flush()]
    assert "".join(pieces) == SMALL.decode(ids, skip_special_tokens=skip)
    assert stream.stopped is None


@given(text=st.text(alphabet="a🍜é人م\n", max_size=30), cuts=CUTS)
@settings(deadline=None)
def test_no_half_characters_on_the_way(text, cuts):
    stream = Detokenizer(SMALL)
    shown = ""
    for run in cut(spelled(text.encode()), cuts):
        shown += stream.push(run)
        assert text.startswith(shown)
    assert shown == text, "nothing is held back once a character is whole"


def first_stop(text, stops, after=0):
    """By trying every end past `after` bytes: where a stop string is complete, and of several then the longest."""
    for end in (end for end in range(len(text) + 1) if len(text[:end].encode()) > after):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None, len(text)


STOPS = st.lists(st.text(alphabet="ab🍜", min_size=1, max_size=4), min_size=1, max_size=4)


@given(
    text=st.text(alphabet="ab🍜", max_size=40), stops=STOPS, cuts=CUTS, include=st.booleans(),
    after=st.sampled_from([0, 0, 3, 10, 25]),
)  # fmt: skip
@settings(deadline=None, max_examples=500)
def test_stop_strings(text, stops, cuts, include, after):
    stop, end = first_stop(text, stops, after)
    ids = spelled(text.encode())
    stream = Detokenizer(SMALL, stop=stops, include_stop=include, stop_after=after)
    shown, used = "", 0
    for run in cut(ids, cuts):
        shown += stream.push(run)
        used += stream.used
        assert len(shown) <= (end if include or stop is None else end - len(stop)), "shown text is never taken back"
    shown += stream.flush()
    assert stream.stopped == stop
    assert shown == text[: end if include or stop is None else end - len(stop)]
    assert used == len(text[:end].encode()), "tokens up to the one that completed the stop string"


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    stream = Detokenizer(SMALL, stop=["\nUser:", "ab"])
    assert stream.push(spelled(b"Hi")) == "Hi"
    assert stream.push(spelled(b"\nUs")) == ""
    assert stream.push(spelled(b"e a")) == "\nUse "
    assert stream.push(spelled(b"c")) == "ac"
    assert stream.push(spelled(b"\nUser")) == ""
    assert stream.flush() == "\nUser"


def test_overlapping_stop_strings():
    stream = Detokenizer(SMALL, stop=["abcd", "bc"])
    assert stream.push(spelled(b"xab")) == "x"
    assert stream.push(spelled(b"cd")) == "a"
    assert (stream.stopped, stream.used) == ("bc", 1)
    assert stream.push(spelled(b"more")) == ""
    assert stream.used == 0
    assert stream.flush() == ""


def test_a_stop_string_inside_one_token(tokenizer):
    ids = tokenizer.encode("one. Hello there", add_special_tokens=False)
    stream = Detokenizer(tokenizer, stop=["ello"])
    assert stream.push(ids) == "one. H"
    assert stream.used == len(tokenizer.encode("one. Hello", add_special_tokens=False))


def test_a_replaced_character_can_complete_a_stop_string_at_the_end():
    stream = Detokenizer(SMALL, stop=["a\ufffd"])
    assert stream.push(spelled(b"xa\xf0")) == "x"
    assert stream.flush() == ""
    assert stream.stopped == "a\ufffd"


def test_a_character_that_the_prompt_left_unfinished():
    prompt, rest = spelled("hi🍜".encode()[:-1]), spelled("🍜!".encode()[3:])
    stream = Detokenizer(SMALL, prompt_token_ids=prompt)
    assert stream.push(rest) + stream.flush() == "🍜!"


def test_real_tokens_of_random_text(tokenizer):
    rng = random.Random(SEED)
    for _ in range(300):
        ids = rng.choices(range(tokenizer.vocab_size), k=rng.randrange(30))
        stream = Detokenizer(tokenizer)
        pieces = [stream.push([id]) for id in ids] + [stream.flush()]
        assert "".join(pieces) == tokenizer.decode(ids), f"{ids} (OCTAVO_SEED={SEED})"


def test_long_streams_and_long_stop_strings_take_no_quadratic_time():
    started = time.process_time()
    ids = spelled(b"ab" * 30_000)
    plain = Detokenizer(SMALL)
    assert sum(len(plain.push([id])) for id in ids) == len(ids)
    stopping = Detokenizer(SMALL, stop=["ab" * 10_000 + "c", "a" * 20_000])
    assert sum(len(stopping.push(ids[at : at + 100])) for at in range(0, len(ids), 100)) >= len(ids) - 20_001
    assert time.process_time() - started < 4
