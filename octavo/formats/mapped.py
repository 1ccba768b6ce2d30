"""Files of weights, mapped read-only, with one-line errors for what is not a file of weights at all."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import BadModelFile

PLAIN_TYPES = ("F32", "F16", "BF16")
"""floats that GGUF and safetensors both hold, and that need nothing beside them"""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place in its file. `shape` is in torch's order (slowest axis first)."""

    name: str
    shape: tuple[int, ...]
    type: str
    """as ggml or safetensors name it; both say F32, F16, BF16"""
    offset: int
    """bytes from the start of the file"""
    nbytes: int


class TensorFile:
    """A mapped file and its tensors by name, in the file's order."""

    def __init__(self, path: Path, tensors: dict[str, TensorInfo], view: mmap.mmap) -> None:
        self.path, self.tensors, self._view = path, tensors, view

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor's bytes as they stand in the file: uint8 [nbytes], not writable, not copied."""
        info = self.tensors[name]
        return np.frombuffer(self._view, np.uint8, info.nbytes, info.offset)

    def digest(self) -> bytes:
        """SHA-256 of the whole file."""
        return sha256(self._view).digest()


def map_file(path: Path, copied: bool = False) -> mmap.mmap:
    """The whole file. Raises BadModelFile if it cannot be read, is empty, or is a Git LFS pointer.

    A file that others may write while we read it must be `copied`: to touch a mapped page that is no longer in the file
    ends the process.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise BadModelFile(f"{path}: the file is empty", fix="download it again")
            view = mmap.mmap(-1, size) if copied else mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            if copied and file.readinto(view) < size:
                raise BadModelFile(f"{path}: the file became shorter while it was read", fix="try again")
    except OSError as err:
        raise BadModelFile(f"{path}: cannot be read ({err.strerror})", fix="check the path and its rights") from err
    if view[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise BadModelFile(
            f"{path}: a Git LFS pointer of {size} bytes, not the weights it points to", fix="run `git lfs pull` there"
        )
    return view
