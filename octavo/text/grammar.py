"""What the library llguidance needs of us: grammars in its form, bounds on them, our tokenizer in its own. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # a name for type checkers alone, not there at run time

    from octavo.text.tokenizer import Tokenizer

_ANCHOR = "\x02"
"""stands before a text that is tokenized as the middle of one; merges with nothing"""
PREVIEW_STEPS = 16


def limits() -> LLParserLimits:
    """Bounds on one request's grammar. Measured on 2 CPUs of a Xeon: a regex such as (a{3000}){3000} ends after
    20 ms and 50 MB (0.6 s and 210 MB with the library's own limits), and what schemas need is far below.
    """
    return LLParserLimits(
        initial_lexer_fuel=200_000, max_lexer_states=20_000, max_grammar_size=200_000, verbose_errors=False
    )


def from_schema(schema: Any, flexible_whitespace: bool, whitespace_pattern: str | None) -> str:
    """JSON that fits the schema. Unknown keywords are refused whatever the schema says."""
    options: JsonCompileOptions = {
        "whitespace_flexible": flexible_whitespace, "lenient": False, "coerce_one_of": False,
    }  # fmt: skip
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = whitespace_pattern
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def from_regex(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


def from_choices(choices: Sequence[str]) -> str:
    """One of the texts."""
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def is_lark(grammar: str) -> bool:
    """Else it is GBNF: xgrammar's EBNF and llama.cpp's, whose rules are written `name ::= …`."""
    return "::=" not in grammar


def to_lark(gbnf: str) -> str:
    """Raises ValueError saying what cannot be converted."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(gbnf)
    except Exception as err:  # the library raises nothing narrower
        raise ValueError(str(err)) from err


class _Words:
    """A tokenizer under the names by which llguidance reads one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids | set(eos_token_ids)
        self.tokens: list[bytes] = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(self._special)
        self.eos_token_id = eos_token_ids[0]
        self.greedy: LLTokenizer | None = None
        """set when there is one"""

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text in the middle of an answer, as the model was taught to cut it; their bytes together are
        exactly the text's, and none is special, though the text may spell one."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._spell(ids, text):
            return ids
        ids = self._tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
        while ids and not self._spell(ids, text):
            ids = ids[1:]
        if ids:
            return ids
        return [] if self.greedy is None else list(self.greedy.greedy_tokenize(text))

    def _spell(self, ids: Sequence[int], text: str) -> bool:
        spelled = b"".join(map(self._tokenizer.token_bytes, ids))
        return spelled == text.encode() and self._special.isdisjoint(ids)


def words_of(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Our tokenizer for llguidance; ids up to `vocab_size` that it lacks are never allowed by a mask.

    Holds the interpreter's lock: 0.1 s for 49,000 tokens, 0.5 s for 150,000.
    """
    words = _Words(tokenizer, vocab_size, eos_token_ids)
    made = LLTokenizer(cast("TokenizerWrapper", words), eos_token=list(eos_token_ids))
    words.greedy, words.tokens = made, []
    return made


class _Bytes:
    """A vocabulary of single bytes and a model's special tokens, at their own ids: small, so that checks are fast."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, special: Mapping[int, str], vocab_size: int) -> None:
        free = [id for id in range(len(special) + 257) if id not in special]
        self._ids, self.eos_token_id = free[:256], free[256]
        self.tokens = [b""] * max(vocab_size, len(special) + 257)
        for byte, id in enumerate(self._ids):
            self.tokens[id] = bytes([byte])
        for id, text in special.items():
            self.tokens[id] = text.encode()
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        return [self._ids[byte] for byte in text.encode()]


def byte_words(special: Mapping[int, str], vocab_size: int) -> LLTokenizer:
    return LLTokenizer(cast("TokenizerWrapper", _Bytes(special, vocab_size)))


def fault_of(grammar: str, words: LLTokenizer) -> str | None:
    """Why llguidance cannot follow the grammar, if it cannot: known when it is compiled or within the first steps."""
    matcher = LLMatcher(words, grammar, log_level=0, limits=limits())
    for _ in range(PREVIEW_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not matcher.is_error():
            matcher.consume_token((mask & -mask).bit_length() - 1)
    return matcher.get_error() or None
