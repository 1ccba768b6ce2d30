"""Which real models a run tests: the default one always, the larger one in full runs and where it lies here already."""

from __future__ import annotations

from pathlib import Path

from octavo.hub.resolve import cache_dir, resolve_model
from tests.matrix import FULL

LARGER = "qwen-coder"
_HERE = (cache_dir() / LARGER / "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf").exists()
REAL_MODELS = ("smollm2", LARGER) if FULL or _HERE else ("smollm2",)


def path_of(name: str) -> Path:
    """The model's file, fetched on first use as a user's `octavo serve NAME` would."""
    return resolve_model(name)
