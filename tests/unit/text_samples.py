"""Random text of the kinds that tokenizers get wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

PIECES = [
    "the", "Hello", "WORLD", "don't", "I'LL", "we've", "it's", "'S", "x", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n",
    " \n", "0", "7", "42", "12345", "3.14", "½", "²", "٣", "Ⅷ", "é", "e\u0301", "ß", "ſ", "Ω", "Привет", "人工智能",
    "こんにちは", "한국어", "مرحبا", "שלום", "हिन्दी", "ไทย", "🍜", "🐉", "👩‍💻", "🇫🇷", "👍🏽", "\u200b", "\u00a0",
    "\u2003", "\u3000", "\ufeff", "\x00", "\x07", "\x1b[0m", "\x7f", "\x85", "\u2028", ".", ",", "!", "?!", "...", "—",
    "«", "$", "€", "+", "<=", "^", "~", "|", "`", "_", "#", "@", "(", ")", "{}", "[]", "/*", "<", "</", "<|", "|>",
    "\\n", "http://", "def f(x):", "\U0010ffff", "\ue000", "ﬁ", "K",
]  # fmt: skip


def random_text(rng: random.Random, specials: Sequence[str] = (), longest: int = 24) -> str:
    """Mixed scripts, white space, digits, contractions, emoji, control characters, and `specials` here and there."""
    parts = []
    for _ in range(rng.randrange(longest)):
        kind = rng.random()
        if kind < 0.75:
            parts.append(rng.choice(PIECES))
        elif kind < 0.8 and specials:
            parts.append(rng.choice(specials))
        elif kind < 0.9:
            parts.append("".join(rng.choices("abcdefghij ABC'", k=rng.randrange(1, 8))))
        else:
            parts.append(rng.choice("\t\n\r a1!é人") * rng.randrange(1, 20))
    return "".join(parts)
