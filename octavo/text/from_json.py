"""A tokenizer from a model's folder: `tokenizer.json`, and what stands beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from octavo.errors import BadModelFile, ModelNotFound
from octavo.text.from_gguf import load as load_gguf
from octavo.text.from_gguf import spelled_with_byte_characters, spelled_with_spaces
from octavo.text.tokenizer import Facts, Tokenizer, Vocabulary, by_id

_MAX_BYTES = 256 << 20
_SPACE = "▁"


def load(path: Path) -> Tokenizer:
    """`path` is the folder or its `tokenizer.json`. A folder with only a GGUF file is read from that."""
    if not path.exists():
        raise ModelNotFound(f"{path} does not exist", fix="give a model's folder or a GGUF file")
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    if not file.exists():
        ggufs = sorted(folder.glob("*.gguf"))
        if ggufs:
            return load_gguf(ggufs[0])
        raise _no_tokenizer(folder)
    text = _read(file)
    try:
        encoder = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise BadModelFile(f"{file} is no tokenizer: {error}", fix="fetch the file again") from error
    return build(encoder, json.loads(text), _settings(folder))


def _no_tokenizer(folder: Path) -> BadModelFile:
    other = [name for name in ("tokenizer.model", "vocab.json", "qwen.tiktoken") if (folder / name).exists()]
    if other:
        cause = f"{folder} has {other[0]} but no tokenizer.json"
        return BadModelFile(
            cause, fix="write one with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    return BadModelFile(f"{folder} has no tokenizer.json", fix="fetch the model again with its tokenizer files")


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_BYTES + 1)  # a device has no size to ask for
        if len(content) > _MAX_BYTES:
            raise BadModelFile(f"{file} is too large", limit=f"{_MAX_BYTES} bytes")
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelFile(f"{file} cannot be read: {error}") from error
    if text.startswith("version https://git-lfs"):
        raise BadModelFile(f"{file} is a Git LFS pointer, not the file itself", fix="run git lfs pull")
    return text


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed by special_tokens_map.json and the chat template files."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if file.exists():
            try:
                settings.update(json.loads(_read(file)))
            except (ValueError, TypeError, RecursionError) as error:
                raise BadModelFile(f"{file} is no JSON object: {error}") from error
    templates = _named_templates(settings.get("chat_template"))
    if (folder / "chat_template.jinja").exists():
        templates["default"] = _read(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read(file)
    settings["chat_template"] = templates
    return settings


def _named_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        try:
            return {str(one["name"]): str(one["template"]) for one in value}
        except (TypeError, KeyError) as error:
            raise BadModelFile("chat_template in tokenizer_config.json is no list of name and template") from error
    if value is None:
        return {}
    raise BadModelFile(f"chat_template in tokenizer_config.json is a {type(value).__name__}", limit="text or a list")


def build(encoder: tokenizers.Tokenizer, document: Mapping[str, Any], settings: Mapping[str, Any]) -> Tokenizer:
    """From a parsed `tokenizer.json` and the settings beside it (`chat_template` there: by name)."""
    byte_level, strip = _decoding(document.get("decoder"))
    named, specials = _named(encoder, settings)
    encoder.add_special_tokens(specials)
    added = encoder.get_added_tokens_decoder()
    texts = by_id(encoder.get_vocab(with_added_tokens=True), "tokenizer.json")
    vocabulary = Vocabulary(
        texts=texts, spelling=spelled_with_byte_characters if byte_level else spelled_with_spaces,
        plain=frozenset(added), special=frozenset(id for id, token in added.items() if token.special),
        strip_first_space=strip,
    )  # fmt: skip
    prefix, suffix = _frame(encoder, settings, named)
    return Tokenizer(encoder, vocabulary, Facts(named, prefix, suffix, settings.get("chat_template") or {}))


def _decoding(decoder: Mapping[str, Any] | None) -> tuple[bool, bool]:
    """Whether tokens are spelled in bytes' characters, and whether decoding drops a text's first space.

    Only decoders under which a token means the same bytes wherever it stands can be streamed exactly.
    """
    steps = [decoder or {}]
    while any(step.get("type") == "Sequence" for step in steps):
        steps = [inner for step in steps for inner in step.get("decoders", [step])]
    byte_level = strip = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "} | {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
                strip = strip or step["start"] == 1
            case {"type": "Metaspace", "replacement": "▁"}:
                strip = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
            case _:
                raise BadModelFile(
                    f"tokenizer.json has a decoder that Octavo does not have: {json.dumps(step)[:200]}",
                    limit="ByteLevel, Metaspace, or Replace, ByteFallback, Fuse and Strip as SentencePiece needs them",
                )
    return byte_level, strip


def _named(encoder: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """The ids of bos, eos, unk and pad, and all tokens that the settings call special and the vocabulary has."""
    named, specials = {}, []
    for name in ("bos", "eos", "unk", "pad"):
        text = _content(settings.get(f"{name}_token"))
        id = encoder.token_to_id(text) if text else None
        if text and id is not None:
            named[name] = id
            specials.append(text)
    extra = list(settings.get("additional_special_tokens") or [])
    more = settings.get("extra_special_tokens") or []
    extra += more.values() if isinstance(more, dict) else more
    specials += [text for one in extra if (text := _content(one)) and encoder.token_to_id(text) is not None]
    known = {token.content for token in encoder.get_added_tokens_decoder().values() if token.special}
    return named, [text for text in specials if text not in known]


def _content(token: Any) -> str | None:
    """A special token stands as text, or as an object with its text in `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _frame(
    encoder: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What goes before and after a text: as `add_bos_token` and `add_eos_token` say, else the post-processor."""
    bare = encoder.encode("a", add_special_tokens=False).ids
    full = encoder.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
    if start is None:
        raise BadModelFile("tokenizer.json has a post-processor that changes the text's own tokens")
    prefix, suffix = tuple(full[:start]), tuple(full[start + len(bare) :])
    bos, eos = named.get("bos"), named.get("eos")
    wanted = settings.get("add_bos_token")
    if isinstance(wanted, bool) and bos is not None and wanted != (prefix[:1] == (bos,)):
        prefix = (bos, *prefix) if wanted else prefix[1:]
    wanted = settings.get("add_eos_token")
    if isinstance(wanted, bool) and eos is not None and wanted != (suffix[-1:] == (eos,)):
        suffix = (*suffix, eos) if wanted else suffix[:-1]
    return prefix, suffix
