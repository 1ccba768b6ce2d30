"""Blocks of the KV cache as files in a directory that several engines may share. No torch.

A file holds one block: a header that says of which numerics, KV group and key it is, a checksum over header and
content, then the content. It appears under its name whole, by a rename; what is torn, changed, of another kind or not
a plain file is no block: it is removed when it is come upon, and counts as absent. No link is ever followed. Nothing is
flushed to the medium by force: after a power failure the checksum finds what did not get there.

Only files that are named as ours are looked at or removed, and all lie in a subdirectory of our own with mode 0700.
"""

from __future__ import annotations

import errno
import heapq
import os
import re
import stat
import struct
import time
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from octavo.errors import UsageError

FOLDER = "octavo-kv-1"
"""the number changes with the header"""
KEY_BYTES = 32
MAX_FILES = 1 << 20
TORN_AFTER_S = 60.0
"""a file being written changes more often than this; an older one is what a killed engine left"""
RESCAN_SHARE = 16
"""the directory is looked through again after this share of its limit was written, for what other engines did"""
_MAGIC = b"octavoKV"
_HEADER = struct.Struct("<8s32sI32sQ")
"""magic, digest of the fingerprint, KV group, key, bytes of content; 32 bytes of checksum follow"""
_DIGEST_BYTES = 32
OVERHEAD_BYTES = _HEADER.size + _DIGEST_BYTES
"""of a file beside the block that it holds"""
_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENXIO)
"""gone, a link, or a socket"""
_NAME = re.compile(r"[0-9a-f]{40}\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{40}\.kv\.[0-9a-f]{16}")


class BlockFolder:
    """`has` from any thread; everything else from one. `max_bytes` bounds what is kept, of whatever engine.

    Each engine keeps to the limit by what it knows, so several of them may together exceed it by a sixteenth each.
    """

    def __init__(self, path: str, max_bytes: int, fingerprint: str) -> None:
        """Raises UsageError for a directory that cannot be used."""
        self.max_bytes = max_bytes
        self._fingerprint = blake2b(fingerprint.encode(), digest_size=32).digest()
        self._directory = _open_folder(path)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """by name, the longest unused first"""
        self.num_bytes = 0
        self._written = 0
        self.scan()

    def has(self, group: int, key: bytes, size: int) -> bool:
        return self._name(self._header(group, key, size)) in self._sizes

    def read(self, group: int, key: bytes, target: memoryview) -> bool:
        """Fills `target`; False, with rubbish in it, where there is no such block, and what stood in its place is gone.

        Raises OSError when the medium fails.
        """
        header = self._header(group, key, len(target))
        name = self._name(header)
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._directory)
        except OSError as err:
            if err.errno in _NO_FILE:
                self._remove(name)
            return False
        try:
            whole = _matches(file, header, target)
            if whole:
                _touch(file)
        finally:
            os.close(file)
        if whole:
            self._note(name, _HEADER.size + _DIGEST_BYTES + len(target))
        else:
            self._remove(name)
        return whole

    def write(self, group: int, key: bytes, content: memoryview) -> bool:
        """Stores a block; False where it does not fit into the limit. Raises OSError when the disk is full or fails."""
        header = self._header(group, key, len(content))
        name, size = self._name(header), len(header) + _DIGEST_BYTES + len(content)
        if name in self._sizes:
            return True
        if not self._make_room(size):
            return False
        temporary = f"{name}.{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o600, dir_fd=self._directory)
        try:
            try:
                for part in (header, _digest(header, content), content):
                    _write_all(file, part)
                _touch(file)
            finally:
                os.close(file)
            os.rename(temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except BaseException as err:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self._directory)
            if isinstance(err, IsADirectoryError):
                return False
            raise
        self._note(name, size)
        self._written += size
        return True

    def scan(self) -> None:
        """Learns anew what is there; removes what is named like a block but is none, and what was never finished."""
        found: list[tuple[int, str, int]] = []
        now = time.time()
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with suppress(OSError):
                    self._look_at(entry, now, found)
        self._sizes = OrderedDict((name, size) for _, name, size in sorted(found))
        self.num_bytes = sum(self._sizes.values())
        self._written = 0

    def _look_at(self, entry: os.DirEntry[str], now: float, found: list[tuple[int, str, int]]) -> None:
        facts = entry.stat(follow_symlinks=False)
        regular = stat.S_ISREG(facts.st_mode)
        if _TEMPORARY.fullmatch(entry.name):
            if not regular or now - facts.st_mtime > TORN_AFTER_S:
                os.unlink(entry.name, dir_fd=self._directory)
        elif _NAME.fullmatch(entry.name):
            if not regular:
                os.unlink(entry.name, dir_fd=self._directory)
                return
            heapq.heappush(found, (facts.st_mtime_ns, entry.name, facts.st_size))
            if len(found) > MAX_FILES:
                os.unlink(heapq.heappop(found)[1], dir_fd=self._directory)

    def close(self) -> None:
        os.close(self._directory)

    def _make_room(self, size: int) -> bool:
        if self._written > self.max_bytes // RESCAN_SHARE:
            self.scan()
        while self._sizes and (self.num_bytes + size > self.max_bytes or len(self._sizes) >= MAX_FILES):
            self._remove(next(iter(self._sizes)))
        return size <= self.max_bytes

    def _remove(self, name: str) -> None:
        self.num_bytes -= self._sizes.pop(name, 0)
        with suppress(OSError):
            os.unlink(name, dir_fd=self._directory)

    def _note(self, name: str, size: int) -> None:
        self.num_bytes += size - self._sizes.pop(name, 0)
        self._sizes[name] = size

    def _header(self, group: int, key: bytes, size: int) -> bytes:
        assert len(key) == KEY_BYTES
        return _HEADER.pack(_MAGIC, self._fingerprint, group, key, size)

    def _name(self, header: bytes) -> str:
        return blake2b(header, digest_size=20).hexdigest() + ".kv"


def check_folder(path: str) -> None:
    """Makes our subdirectory of `path` if need be. Raises UsageError where it cannot be used."""
    os.close(_open_folder(path))


def _open_folder(path: str) -> int:
    """A descriptor of our subdirectory of `path`, made if need be."""
    folder = Path(path) / FOLDER
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        facts = os.fstat(descriptor)
        mine = facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) == 0o700
        writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError) as err:
        raise UsageError(
            f"--kv-offloading-dir {path} cannot be used: {err}", fix="name a folder that you may write to",
            param="kv_offloading_dir",
        ) from err  # fmt: skip
    if not (mine and writable):
        os.close(descriptor)
        raise UsageError(
            f"{folder} is not yours alone: its mode is {stat.S_IMODE(facts.st_mode):o}, its owner {facts.st_uid}",
            limit=f"mode 700, owner {os.geteuid()}", fix="name another folder or correct it", param="kv_offloading_dir",
        )  # fmt: skip
    return descriptor


def _matches(file: int, header: bytes, target: memoryview) -> bool:
    """Reads the file into `target`; whether it is a plain file with this header, whole and unchanged."""
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size != len(header) + _DIGEST_BYTES + len(target):
        return False
    start = bytearray(len(header) + _DIGEST_BYTES)
    if not (_read_all(file, memoryview(start)) and start[: len(header)] == header):
        return False
    return _read_all(file, target) and start[len(header) :] == _digest(header, target)


def _touch(file: int) -> None:
    """Notes the use by our clock, which has a finer grain than that of the file system."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def _digest(header: bytes, content: memoryview) -> bytes:
    digest = blake2b(header, digest_size=_DIGEST_BYTES)
    digest.update(content)
    return digest.digest()


def _read_all(file: int, target: memoryview) -> bool:
    filled = 0
    while filled < len(target):
        count = os.readv(file, [target[filled:]])
        if not count:
            return False
        filled += count
    return True


def _write_all(file: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
