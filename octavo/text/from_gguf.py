"""A tokenizer built from a GGUF file's metadata (keys `tokenizer.*`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, models, normalizers

from octavo.errors import BadModelFile
from octavo.text.pretokenizers import pre_tokenizer
from octavo.text.tokenizer import Facts, Tokenizer, Vocabulary

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""values of `tokenizer.ggml.token_type`; 1 is a normal token"""
_TEMPLATE = "tokenizer.chat_template"
_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_KINDS = {
    "tokenizer.ggml.model": str, "tokenizer.ggml.pre": str, "tokenizer.ggml.tokens": list[str],
    "tokenizer.ggml.token_type": list[int], "tokenizer.ggml.merges": list[str], "tokenizer.ggml.scores": list[float],
    _TEMPLATE: str, "tokenizer.chat_templates": list[str],
}  # fmt: skip
_SPACE = "▁"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def load(path: Path) -> Tokenizer:
    from octavo.formats.gguf import read_gguf  # only this way in needs the reader

    return from_metadata(read_gguf(path).metadata)


def from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises BadModelFile naming the key that is missing, unknown, of another type or does not fit the others."""
    for key, kind in _KINDS.items():
        _check_kind(key, metadata.get(key), kind)
    model = _get(metadata, "model", str)
    tokens: list[str] = _get(metadata, "tokens", list)
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise BadModelFile(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if model == "gpt2":
        pre = pre_tokenizer(metadata.get("tokenizer.ggml.pre") or "default")
        encoder, add_bos = _byte_level(metadata, tokens, pre.ignore_merges), pre.add_bos
        encoder.pre_tokenizer = pre.build()
    elif model == "llama":
        encoder, add_bos = _sentencepiece(metadata, tokens, types), True
    else:
        raise BadModelFile(
            f"the GGUF file's tokenizer (tokenizer.ggml.model) is {model!r}", limit="gpt2 or llama",
            fix="use a model with a BPE tokenizer",
        )  # fmt: skip
    _add_tokens(encoder, tokens, types)
    return Tokenizer(encoder, _vocabulary(metadata, model, tokens, types), _facts(metadata, tokens, add_bos))


def _check_kind(key: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind | None)
    except msgspec.ValidationError as error:
        raise BadModelFile(f"the GGUF file's {key}: {error}", fix="fetch or convert the file again") from None


def _get(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, kind) or not value:
        raise BadModelFile(
            f"the GGUF file has no usable tokenizer.ggml.{key}", fix="convert the model again, with its tokenizer"
        )
    return value


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], ignore_merges: bool) -> tokenizers.Tokenizer:
    merges = []
    for line in _get(metadata, "merges", list):
        space = line.find(" ", 1)  # a token may itself start with a space
        merges.append((line[:space], line[space + 1 :]))
    vocab = {token: id for id, token in enumerate(tokens)}
    return tokenizers.Tokenizer(_bpe(vocab, merges, ignore_merges=ignore_merges))


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # the library raises nothing narrower
        raise BadModelFile(
            f"the GGUF file's merges and tokens do not fit: {error}", fix="fetch the file again"
        ) from error


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: the pair merges first whose joined token scores highest."""
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise BadModelFile(
            "tokenizer.ggml.remove_extra_whitespaces is true, which Octavo does not have for SentencePiece BPE",
            fix="use the model's original folder with tokenizer.json",
        )
    scores: list[float] = _get(metadata, "scores", list)
    if len(scores) != len(tokens):
        raise BadModelFile(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocab = {token: id for id, token in enumerate(tokens)}
    normal = {token: id for token, id in vocab.items() if types[id] == 1}
    ranked = [
        (-scores[id], id, token[:cut], token[cut:])
        for token, id in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    merges = [(left, right) for _, _, left, right in sorted(ranked)]
    unknown = next((token for token, type in zip(tokens, types, strict=True) if type == UNKNOWN), None)
    encoder = tokenizers.Tokenizer(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(_SPACE)] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    encoder.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    return encoder


def _add_tokens(encoder: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Makes control and user-defined tokens whole wherever they stand in a text."""
    control = [tokens[id] for id, type in enumerate(types) if type in (UNKNOWN, CONTROL) and tokens[id]]
    defined = [tokens[id] for id, type in enumerate(types) if type == USER_DEFINED and tokens[id]]
    encoder.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    encoder.add_tokens([AddedToken(text, normalized=False, special=False) for text in defined])


def _vocabulary(metadata: Mapping[str, Any], model: str, tokens: Sequence[str], types: Sequence[int]) -> Vocabulary:
    by_type: dict[int, set[int]] = {}
    for id, type in enumerate(types):
        if type != 1:
            by_type.setdefault(type, set()).add(id)
    special = frozenset(by_type.get(CONTROL, set()) | by_type.get(UNKNOWN, set()))
    spm = model == "llama"
    return Vocabulary(
        texts=tokens, spelling=spelled_with_spaces if spm else spelled_with_byte_characters,
        plain=special | by_type.get(USER_DEFINED, set()), silent=frozenset(by_type.get(UNUSED, set())), special=special,
        strip_first_space=spm and bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
    )  # fmt: skip


def _facts(metadata: Mapping[str, Any], tokens: Sequence[str], add_bos: bool) -> Facts:
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _IDS.items()}
    named = {name: id for name, id in ids.items() if id is not None}
    templates = {"default": metadata[_TEMPLATE]} if metadata.get(_TEMPLATE) else {}
    for name in metadata.get("tokenizer.chat_templates") or []:
        key = f"{_TEMPLATE}.{name}"
        if not isinstance(metadata.get(key), str):
            raise BadModelFile(f"the GGUF file names a chat template {name!r} and has no text in {key}")
        templates[name] = metadata[key]
    return Facts(
        named=named, chat_templates=templates,
        prefix=_frame(metadata, "bos", named, add_bos), suffix=_frame(metadata, "eos", named, False),
    )  # fmt: skip


def _frame(metadata: Mapping[str, Any], name: str, named: Mapping[str, int], default: bool) -> tuple[int, ...]:
    key = f"tokenizer.ggml.add_{name}_token"
    if not metadata.get(key, default):
        return ()
    if name not in named:
        if key not in metadata:
            return ()
        raise BadModelFile(f"{key} is true, but the file has no tokenizer.ggml.{name}_token_id")
    return (named[name],)


def spelled_with_spaces(token: str) -> bytes:
    """SentencePiece: `▁` is a space, `<0x0A>` a byte."""
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE, " ").encode("utf-8", "replace")


@functools.cache
def byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 and up, in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def spelled_with_byte_characters(token: str) -> bytes:
    """Byte-level BPE: each character stands for a byte; a token with another character is its own text."""
    table = byte_characters()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")
