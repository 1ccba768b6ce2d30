"""How text is cut into words before byte-level BPE, by the name a GGUF file gives in `tokenizer.ggml.pre`.

A GGUF file carries no pre-tokenizer, only its name, and llama.cpp defines what that means: the expressions of the
models' own `tokenizer.json`, and no normalization (Qwen's own files compose characters first, by NFC). Patterns apply
one after the other, each to the pieces that the one before left: a match becomes a piece of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from octavo.errors import BadModelFile

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HEAD = r"[^\r\n\p{L}\p{N}]?"


def _cased_words(suffix: str, digits: str) -> str:
    """Words split where lower case turns to upper, as the newest tiktoken patterns do."""
    words = f"{_HEAD}{_UPPER}*{_LOWER}+{suffix}|{_HEAD}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


def _plain_words(digits: str) -> str:
    return rf"{_ENGLISH_SUFFIX}|{_HEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"


@dataclass(frozen=True)
class PreTokenizer:
    """`ignore_merges`: a word that is a token stays whole. `add_bos`: what holds when the file does not say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


_GPT2_WORDS = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_plain_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_LLAMA3_MERGING = PreTokenizer((_plain_words(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_plain_words(r"\p{N}"),))
_TEKKEN = PreTokenizer((_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True)
_GPT4O = PreTokenizer((_cased_words(f"{_ENGLISH_SUFFIX}?", r"\p{N}{1,3}"),))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_KNOWN: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "jais", "gigachat", "exaone4", "mellum", "trillion"), _GPT2_WORDS
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _LLAMA3_MERGING),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "kormo"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Raises BadModelFile that names an unknown one and lists those known."""
    if name not in _KNOWN:
        raise BadModelFile(
            f"the GGUF file's pre-tokenizer (tokenizer.ggml.pre) is {name!r}, which is unknown",
            limit=f"one of {', '.join(sorted(_KNOWN))}",
            fix="use a GGUF of another model, or the model's original folder with tokenizer.json",
        )
    return _KNOWN[name]
