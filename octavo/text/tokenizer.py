"""Text to token ids and back, whatever file the tokenizer came from.

Encoding is the `tokenizers` library's. Decoding is ours: each token stands for fixed bytes, so a text is the UTF-8
decoding of its tokens' bytes (invalid sequences become U+FFFD), and a stream of tokens can be decoded as it comes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from octavo.errors import BadModelFile, InvalidRequest

_BRIEF_CHARACTERS = 1024
"""Only batches are encoded without the interpreter's lock: one text of 600,000 letters held it for half a second."""
_NAMES = ("bos", "eos", "unk", "pad")
MAX_UNUSED_IDS = 1 << 20
"""ids below the highest that no token has: each costs memory, and a file can name any number"""


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer's file says of its tokens.

    `texts[i]` is the token as the file spells it, None for an id that has none; `plain` holds the ids whose spelling is
    their text (added tokens); `silent` those that never show (unused ids); `spelling` turns the others into bytes.
    """

    texts: Sequence[str | None]
    spelling: Callable[[str], bytes]
    plain: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    special: frozenset[int] = frozenset()
    strip_first_space: bool = False
    """a text's first space is one that encoding put there"""


def by_id(tokens: Mapping[str, int], source: str) -> list[str | None]:
    """Each id's token, None where there is none. Raises BadModelFile for ids too far apart to be a vocabulary."""
    highest, limit = max(tokens.values(), default=-1), len(tokens) + MAX_UNUSED_IDS
    if highest > limit:
        raise BadModelFile(
            f"{source} gives a token the id {highest}", limit=f"{limit} for {len(tokens)} tokens",
            fix="fetch the file again",
        )  # fmt: skip
    texts: list[str | None] = [None] * (highest + 1)
    for token, id in tokens.items():
        texts[id] = token
    return texts


@dataclass(frozen=True)
class Facts:
    """`named` maps bos, eos, unk, pad, … to token ids; `prefix` and `suffix` are what encoding may add."""

    named: Mapping[str, int] = field(default_factory=dict)
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """by name; "default" is the one to use"""


class Tokenizer:
    """Safe to use from several threads; encoding more than a moment's worth of text releases the interpreter lock."""

    def __init__(self, encoder: tokenizers.Tokenizer, vocabulary: Vocabulary, facts: Facts) -> None:
        encoder.no_truncation()
        encoder.no_padding()
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._bytes: list[bytes | None] = [None] * len(vocabulary.texts)
        self.facts = facts
        self.vocab_size = len(vocabulary.texts)
        self.special_ids = vocabulary.special
        self.strip_first_space = vocabulary.strip_first_space
        for name in _NAMES:
            id = facts.named.get(name)
            if id is not None and not (type(id) is int and 0 <= id < self.vocab_size):
                raise BadModelFile(f"{name}_token_id is {id!r}", limit=f"0 to {self.vocab_size - 1}")

    @property
    def bos_token_id(self) -> int | None:
        return self.facts.named.get("bos")

    @property
    def eos_token_id(self) -> int | None:
        return self.facts.named.get("eos")

    @property
    def unk_token_id(self) -> int | None:
        return self.facts.named.get("unk")

    @property
    def pad_token_id(self) -> int | None:
        return self.facts.named.get("pad")

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def special_tokens(self) -> dict[str, str]:
        """`{"bos_token": "<s>", …}`: what a chat template may name."""
        named = {name: self.facts.named.get(name) for name in _NAMES}
        return {f"{name}_token": self.token_text(id) for name, id in named.items() if id is not None}

    @property
    def chat_template(self) -> str | None:
        return self.facts.chat_templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """A template of its own for requests with tools, where the model has one."""
        return self.facts.chat_templates.get("tool_use")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written in `text` become their ids; `add_special_tokens` adds those of the model's rule.

        Raises InvalidRequest if `text` holds half a surrogate pair.
        """
        if len(text) > _BRIEF_CHARACTERS:
            return self.encode_batch([text], add_special_tokens)[0]
        ids = self._encoder.encode(_encodable(text), add_special_tokens=False).ids
        return self._framed(ids) if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        encodings = self._encoder.encode_batch_fast([_encodable(text) for text in texts], add_special_tokens=False)
        return [self._framed(e.ids) if add_special_tokens else e.ids for e in encodings]

    def token_id(self, text: str) -> int | None:
        """The token that is spelled so in the vocabulary."""
        found: int | None = self._encoder.token_to_id(text)
        return found

    def _framed(self, ids: list[int]) -> list[int]:
        return [*self.facts.prefix, *ids, *self.facts.suffix]

    def longest_text(self, tokens: int) -> int:
        """In bytes of UTF-8: a longer text has more than so many tokens."""
        return tokens * self._most_bytes_a_token

    @functools.cached_property
    def _most_bytes_a_token(self) -> int:
        from octavo.text.shrinkage import shrinkage  # it asks how bytes are spelled, and that builds on this module

        return shrinkage(self._encoder) * max((len(self.token_bytes(id)) for id in range(self.vocab_size)), default=1)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens together; `token_bytes` says what an id beyond the vocabulary stands for."""
        raw = b"".join(self.token_bytes(id) for id in ids if not (skip_special_tokens and id in self.special_ids))
        if self.strip_first_space and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes the token stands for; they may be part of a character.

        No bytes for an id beyond the vocabulary: a model's logits are often padded, and such an id can be sampled.
        """
        if not 0 <= id < self.vocab_size:
            return b""
        known = self._bytes[id]
        if known is None:
            known = self._bytes[id] = self._spell(id)
        return known

    def _spell(self, id: int) -> bytes:
        text = self._vocabulary.texts[id]
        if text is None or id in self._vocabulary.silent:
            return b""
        return text.encode("utf-8", "replace") if id in self._vocabulary.plain else self._vocabulary.spelling(text)

    def token_text(self, id: int) -> str:
        """The token alone as text; bytes that are no character alone show as U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text holds half a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}",
            fix="send valid Unicode",
        ) from error
    return text


def load_tokenizer(path: Path) -> Tokenizer:
    """From a GGUF file, a `tokenizer.json`, or a folder that holds one of them (`tokenizer.json` first).

    Raises ModelNotFound or BadModelFile.
    """
    from octavo.text import from_gguf, from_json  # they build on this module

    return from_gguf.load(path) if path.suffix == ".gguf" else from_json.load(path)
