"""Paths and small text files that a user names, with one-line errors for whatever the system has against them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.errors import UsageError

_SHOWN = 200
_PATH_BYTES, _NAME_BYTES = 4095, 255
"""of Linux: the whole, and each name in it"""


def shown(text: str) -> str:
    """As it can stand in a message: not endless, and with nothing in it that cannot be printed."""
    short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
    return short if short and short.isprintable() else repr(short)


def as_path(text: str, param: str) -> Path:
    """The path that a user wrote, `~` expanded. Raises UsageError for what can be none."""
    try:
        names = text.encode("utf-8").split(b"/")
        if not text or "\0" in text:
            raise ValueError("it is empty" if not text else "it holds a null character")
        if len(text) > _PATH_BYTES or max(map(len, names)) > _NAME_BYTES:
            raise ValueError("it is too long")
        return Path(text).expanduser()
    except (ValueError, RuntimeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeEncodeError) else error
        raise UsageError(f"{shown(text)} is no path: {why}", fix="give another path", param=param) from error


@contextmanager
def usable(name: str, param: str) -> Iterator[None]:
    """What the system has against a path while the block runs becomes a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{shown(name)} cannot be read: {error.strerror or error}", fix="check the path and its rights", param=param
        ) from error


def read_text(text: str, param: str, limit: int) -> str:
    """A file's text; never more than `limit` bytes are read, so that it may also be a pipe or a device.

    Raises UsageError for a file that cannot be read, is larger, or is not UTF-8.
    """
    path = as_path(text, param)
    with usable(text, param), path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UsageError(f"{shown(text)} is too large", limit=f"{limit} bytes", fix="give another file", param=param)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown(text)} is no text: {error}", fix="give a file in UTF-8", param=param) from error
