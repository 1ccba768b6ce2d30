"""A tokenizer for the tiny models: printable ASCII, some longer tokens, and ids without a token."""

from __future__ import annotations

import random
import string

import tokenizers
from tokenizers import models

from octavo.text.tokenizer import Facts, Tokenizer, Vocabulary
from tests.engine.tiny import VOCAB

EOS = 2
SPECIAL = ["<unk>", "<s>", "</s>"]


def tiny_tokenizer(rng: random.Random) -> Tokenizer:
    letters = [*string.printable[:95], "\n"]
    merges: list[tuple[str, str]] = []
    known = list(letters)
    while len(SPECIAL) + len(known) < VOCAB - 7:
        pair = (rng.choice(known), rng.choice(known if rng.random() < 0.3 else '{}[]":, aeinst'))
        if "".join(pair) not in known:
            merges.append(pair)
            known.append("".join(pair))
    vocab = {text: id for id, text in enumerate([*SPECIAL, *known])}
    encoder = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    encoder.add_special_tokens(SPECIAL)
    vocabulary = Vocabulary([*SPECIAL, *known], str.encode, frozenset(range(3)), special=frozenset(range(3)))
    return Tokenizer(encoder, vocabulary, Facts({"unk": 0, "bos": 1, "eos": EOS}))
