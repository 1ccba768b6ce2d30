"""From what a user calls a model to its files on disk."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.errors import ModelNotFound, UsageError
from octavo.formats.text_file import as_path, shown, usable
from octavo.hub.embedded import MODELS, embedded_model
from octavo.hub.fetch import Progress, fetch

_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")


def resolve_model(name: str, download_dir: str | None = None, progress: Progress | None = None) -> Path:
    """An existing path stands for itself; an embedded model's name for its file, which is fetched on first use.

    `progress(stage, done_bytes, total_bytes)` is called while that takes time. Raises ModelNotFound, or UsageError
    when a model cannot be fetched.
    """
    if not name or "\0" in name:
        raise UsageError(f"{shown(name)!r} names no model", fix=f"give a path, or one of {_names()}", param="model")
    path = as_path(name, "model")
    with usable(name, "model"):
        if path.exists():
            return path
    model = embedded_model(name)
    if model:
        return fetch(model, cache_dir(download_dir), progress or _silent)
    if _looks_like_a_path(name):
        raise ModelNotFound(
            f"no file or folder {shown(str(path))}", fix=f"check the path, or use one of {_names()}", param="model"
        )
    if "/" in name:
        raise ModelNotFound(
            f"{shown(name)} looks like a model on a hub; pulling from hubs is not part of this version",
            fix=f"give the path of a GGUF file or of a model's folder, or one of {_names()}", param="model",
        )  # fmt: skip
    raise ModelNotFound(f"no model is called {shown(name)!r}", fix=f"give a path, or one of {_names()}", param="model")


def _names() -> str:
    return ", ".join(model.name for model in MODELS)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.lower().endswith(_FILE_SUFFIXES)


def _silent(stage: str, done_bytes: int, total_bytes: int) -> None:
    pass


def cache_dir(download_dir: str | None = None) -> Path:
    """`--download-dir`, else `OCTAVO_CACHE`, else `octavo` in `XDG_CACHE_HOME`, else `~/.cache/octavo`."""
    chosen = download_dir or os.environ.get("OCTAVO_CACHE")
    if chosen:
        return as_path(chosen, "download_dir")
    return as_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "download_dir") / "octavo"
