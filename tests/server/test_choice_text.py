"""Token events to text deltas: the end decides what is shown, a stop string ends a choice whatever the engine says."""

from __future__ import annotations

import random

import pytest

from octavo.engine.choice_text import ChoiceText
from octavo.engine.types import SamplingParams, TokenEvent, TokenLogprobs
from octavo.text.tokenizer import load_tokenizer
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/choice-text")
TEXT = "Pages of an octavo: naïve 日本語 😀, folded three times."


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


def pieces(ids: list[int], finish: str, **more) -> list[TokenEvent]:
    """The tokens in events of 1 to 3; the last one has the end."""
    made, rest = [], list(ids)
    while rest:
        size = RNG.randint(1, 3)
        now, rest = rest[:size], rest[size:]
        made.append(TokenEvent("r", 0, now, [TokenLogprobs([i], [-1.0], 1) for i in now]))
    made[-1].finish_reason = finish
    for name, value in more.items():
        setattr(made[-1], name, value)
    return made


def taken(tokenizer, params: SamplingParams, events: list[TokenEvent]):
    choice = ChoiceText(tokenizer, params, tokenizer.encode("Hi"))
    deltas = []
    for event in events:
        if choice.open:
            deltas.append(choice.take(event))
    assert not choice.open
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert all(len(d.token_ids) == len(d.logprobs) for d in deltas)
    return "".join(d.text for d in deltas), [i for d in deltas for i in d.token_ids], deltas[-1]


def test_at_length_all_is_shown(tokenizer):
    ids = tokenizer.encode(TEXT)
    text, shown, last = taken(tokenizer, SamplingParams(), pieces(ids, "length"))
    assert (text, shown, last.finish_reason) == (TEXT, ids, "length"), f"OCTAVO_SEED={SEED}"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_shows_only_when_asked_for(tokenizer, include):
    ids = tokenizer.encode(TEXT)
    events = pieces(ids, "stop", stop_reason=ids[-1])
    text, shown, last = taken(tokenizer, SamplingParams(include_stop_str_in_output=include), events)
    assert text == tokenizer.decode(ids if include else ids[:-1])
    assert (shown, last.stop_reason) == (ids, ids[-1])


def test_a_stop_string_ends_the_choice_and_drops_what_follows(tokenizer):
    start = RNG.randrange(1, len(TEXT) - 6)
    stop = TEXT[start : start + RNG.randint(1, 5)]
    expected = TEXT[: TEXT.index(stop)]
    events = pieces(tokenizer.encode(TEXT), "length")
    text, shown, last = taken(tokenizer, SamplingParams(stop=(stop, "never")), events)
    assert text == expected, f"{stop!r} OCTAVO_SEED={SEED}"
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert tokenizer.decode(shown).startswith(expected)
    assert stop not in tokenizer.decode(shown[:-1]), "the last token is the one that completed it"


def test_an_abort_shows_what_was_held_back(tokenizer):
    ids = tokenizer.encode("abc fold")
    events = [*pieces(ids, "length")[:-1], TokenEvent("r", 0, [], [], finish_reason="abort")]
    before = [i for event in events for i in event.token_ids]
    text, _, last = taken(tokenizer, SamplingParams(stop=("folded",)), events)
    assert (text, last.finish_reason) == (tokenizer.decode(before), "abort")
