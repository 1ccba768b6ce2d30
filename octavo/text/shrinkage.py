"""How much shorter a text can get on its way to tokens, from the parts that a tokenizer is put together of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import models

COMPOSED = 4
"""NFC and NFD: 9 bytes of Hangul jamo become one character of 3, the Kelvin sign's 3 become K"""
LOSSY = 64
"""for what may drop or fold any stretch of a text: it is refused only when that would have to be nearly all of it"""
_TEXT_BYTES = {*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1), 0xF3, 0xF4}
"""Bytes of UTF-8 that text is made of. Some vocabularies lack others: of control characters and unassigned planes."""
_KEEPS = {"Prepend", "ByteLevel", "Metaspace", "Digits", "Punctuation"}
_COMPOSES = {"NFC", "NFD"}


def shrinkage(encoder: tokenizers.Tokenizer) -> int:
    """At most how many bytes of a text stand behind each byte of its tokens; of `LOSSY` ones, nearly always."""
    if not _every_byte_has_a_token(encoder):
        return LOSSY
    if any(token.lstrip or token.rstrip for token in encoder.get_added_tokens_decoder().values()):
        return LOSSY  # such a token takes in any length of space around it
    return max((_of(step) for part in (encoder.normalizer, encoder.pre_tokenizer) for step in _steps(part)), default=1)


def _every_byte_has_a_token(encoder: tokenizers.Tokenizer) -> bool:
    """Else what is unknown is dropped, or a stretch of it becomes one token."""
    model = encoder.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback:
        return all(encoder.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    kinds = {step["type"] for part in (encoder.normalizer, encoder.pre_tokenizer) for step in _steps(part)}
    from octavo.text.from_gguf import byte_characters

    return "ByteLevel" in kinds and all(
        encoder.token_to_id(character) is not None
        for character, byte in byte_characters().items()
        if byte in _TEXT_BYTES
    )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, or of those in a sequence, as `tokenizer.json` has them."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += step.get("normalizers") or step.get("pretokenizers") or []
        else:
            yield step


def _of(step: dict[str, Any]) -> int:
    match step:
        case {"type": kind} if kind in _KEEPS:
            return 1
        case {"type": kind} if kind in _COMPOSES:
            return COMPOSED
        case {"type": "Split", "behavior": behavior} if behavior != "Removed":
            return 1
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if len(new.encode()) >= len(old.encode()):
            return 1
    return LOSSY
