"""Files of weights, mapped read-only, with one-line errors for what is not a file of weights at all."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from octavo.errors import BadModelFile

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def map_file(path: Path) -> mmap.mmap:
    """The whole file. Raises BadModelFile if it cannot be read, is empty, or is a Git LFS pointer."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise BadModelFile(f"{path}: the file is empty", fix="download it again")
            view = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as err:
        raise BadModelFile(f"{path}: cannot be read ({err.strerror})", fix="check the path and its rights") from err
    if view[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise BadModelFile(
            f"{path}: a Git LFS pointer of {size} bytes, not the weights it points to", fix="run `git lfs pull` there"
        )
    return view
