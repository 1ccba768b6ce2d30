"""The model families: every module in `families/`. A new family is a new file there. No torch.

A family has `ARCHITECTURES` (names in config.json), `spec(ConfigReader) -> DecoderSpec` and `WEIGHTS`; if it exists in
GGUF too, also `GGUF_ARCHITECTURES` (name there to name in config.json), `GGUF_INTERLEAVED_ROPE` when rows of q and k
are reordered there, and `gguf_settings(tensor names)` for config keys that GGUF's metadata lacks.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from octavo.errors import BadModelFile
from octavo.models import families
from octavo.models.spec import ConfigReader, DecoderSpec, Weight


@dataclass(frozen=True)
class Family:
    architectures: tuple[str, ...]
    spec: Callable[[ConfigReader], DecoderSpec]
    weights: tuple[Weight, ...]
    gguf_architectures: dict[str, str]
    gguf_interleaved_rope: bool
    gguf_settings: Callable[[Container[str]], dict[str, Any]]


@cache
def all_families() -> tuple[Family, ...]:
    names = [m.name for m in pkgutil.iter_modules(families.__path__) if not m.name.startswith("_")]
    return tuple(_family(import_module(f"{families.__name__}.{name}")) for name in names)


def family_of(architecture: str, source: str) -> Family:
    """Raises BadModelFile naming the architecture and those that are known."""
    known = {name: family for family in all_families() for name in family.architectures}
    if architecture not in known:
        raise _unknown(source, architecture, known)
    return known[architecture]


def architecture_of_gguf(name: str, source: str) -> str:
    """The config.json name of a GGUF architecture. Raises BadModelFile as `family_of`."""
    known = {gguf: name for family in all_families() for gguf, name in family.gguf_architectures.items()}
    if name not in known:
        raise _unknown(source, name, known)
    return known[name]


def _unknown(source: str, name: str, known: dict[str, Any]) -> BadModelFile:
    return BadModelFile(
        f"{source}: architecture {name[:100]!r} is unknown", limit=", ".join(sorted(known)), fix="use one of these"
    )


def _family(module: Any) -> Family:
    return Family(
        module.ARCHITECTURES, module.spec, module.WEIGHTS, getattr(module, "GGUF_ARCHITECTURES", {}),
        getattr(module, "GGUF_INTERLEAVED_ROPE", False), getattr(module, "gguf_settings", lambda tensors: {}),
    )  # fmt: skip
