"""Reader of GGUF files, version 2 and 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Every count, length and offset is checked against the file before it is used, and limits hold for what a header may
make us allocate, so that a truncated or hostile file costs little and ends in BadModelFile.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.errors import BadModelFile
from octavo.formats.mapped import TensorFile, TensorInfo, map_file

MAX_HEADER_BYTES = 256 << 20
MAX_ARRAY_ITEMS = 4 << 20
"""over all metadata; the largest vocabularies need about 1.5 million"""
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_DIMS = 4
MAX_NAME_BYTES = 1024
"""of a metadata key or a tensor's name"""

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""quantized types that Octavo can use"""

_MAGIC = b"GGUF"
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""value type to numpy dtype; 7 is bool"""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFFile(TensorFile):
    """A mapped file: `metadata` as plain Python values, `tensors` by name in the file's order."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo], view: mmap.mmap) -> None:
        super().__init__(path, tensors, view)
        self.metadata = metadata


def read_gguf(path: Path | str) -> GGUFFile:
    """Raises BadModelFile naming what is wrong with the file."""
    path = Path(path)
    view = map_file(path)
    header = _Header(path, view)
    count_tensors, count_keys = _read_counts(header)
    metadata = _read_metadata(header, count_keys)
    tensors = _read_directory(header, count_tensors, metadata)
    return GGUFFile(path, metadata, tensors, view)


class _Header:
    """A cursor over the header that never reads past the file or `MAX_HEADER_BYTES`."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path, self.view, self.size = path, view, len(view)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.position = 0
        self.items_left = MAX_ARRAY_ITEMS

    def fail(self, cause: str, *, limit: str | None = None, fix: str = "download the file again") -> NoReturn:
        raise BadModelFile(f"{self.path}: {cause}", limit=limit, fix=fix)

    def need(self, nbytes: int, what: str) -> int:
        """Moves over `nbytes` and returns where they start."""
        start = self.position
        if nbytes > self.end - start:
            if self.end < self.size:
                self.fail(f"{what} at byte {start} makes the header too long", limit=f"{MAX_HEADER_BYTES} bytes")
            self.fail(
                f"truncated: {what} at byte {start} needs {nbytes} bytes",
                limit=f"the file has {self.size} bytes",
            )
        self.position = start + nbytes
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.view, self.need(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.view, self.need(8, what))[0]
        return value

    def string(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = self.u64(f"length of {what}")
        if length > limit:
            self.fail(f"{what} claims to be {length} bytes long", limit=f"{limit} bytes")
        start = self.need(length, what)
        try:
            return self.view[start : start + length].decode()
        except UnicodeDecodeError as err:
            raise BadModelFile(
                f"{self.path}: {what} at byte {start} is not UTF-8 ({err.reason})", fix="download the file again"
            ) from err

    def scalar(self, kind: int, what: str) -> Any:
        dtype = np.dtype(_SCALARS[kind])
        start = self.need(dtype.itemsize, what)
        value = np.frombuffer(self.view, dtype, 1, start)[0].item()
        return self.bools([value], what)[0] if kind == _BOOL else value

    def bools(self, values: list[int], what: str) -> list[bool]:
        if any(v > 1 for v in values):
            self.fail(f"{what} is a bool of value {max(values)}", limit="0 or 1")
        return [v == 1 for v in values]

    def strings(self, count: int, what: str) -> list[str]:
        """As `string`, `count` times; one tight loop, as vocabularies have hundreds of thousands."""
        view, end, position, unpack = self.view, self.end, self.position, _U64.unpack_from
        values: list[str] = []
        try:
            for _ in range(count):
                length = unpack(view, position)[0]
                position += 8
                if length > end - position:
                    raise struct.error
                values.append(view[position : position + length].decode())
                position += length
        except (struct.error, UnicodeDecodeError) as err:
            reason = "is not UTF-8" if isinstance(err, UnicodeDecodeError) else "is cut off"
            self.fail(
                f"string {len(values)} of {what} near byte {position} {reason}",
                limit=f"the file has {self.size} bytes",
            )
        self.position = position
        return values

    def array(self, what: str) -> list[Any]:
        kind = self.u32(f"element type of {what}")
        count = self.u64(f"length of {what}")
        if count > self.items_left:
            self.fail(f"{what} has {count} elements", limit=f"{MAX_ARRAY_ITEMS} in all arrays together")
        self.items_left -= count
        if kind == _STRING:
            if count * 8 > self.end - self.position:
                self.need(count * 8, what)
            return self.strings(count, what)
        if kind not in _SCALARS:
            self.fail(f"{what} is an array of type {kind}", limit="numbers, bools or strings")
        dtype = np.dtype(_SCALARS[kind])
        start = self.need(count * dtype.itemsize, what)
        values: list[Any] = np.frombuffer(self.view, dtype, count, start).tolist()
        return self.bools(values, what) if kind == _BOOL and values else values


def _read_counts(header: _Header) -> tuple[int, int]:
    start = header.need(4, "the magic")
    magic = header.view[start : start + 4]
    if magic != _MAGIC:
        header.fail(f"not a GGUF file: it starts with {magic!r}", limit=f"{_MAGIC!r}", fix="give a GGUF file")
    version = header.u32("the version")
    if version & 0xFFFF == 0 and version:
        header.fail("a big-endian GGUF file", limit="little-endian", fix="convert it again without --bigendian")
    if version not in (2, 3):
        header.fail(f"GGUF version {version}", limit="version 2 or 3", fix="convert the model again")
    tensors, keys = header.u64("the number of tensors"), header.u64("the number of keys")
    if tensors > MAX_TENSORS:
        header.fail(f"the header claims {tensors} tensors", limit=f"{MAX_TENSORS}")
    if keys > MAX_KEYS:
        header.fail(f"the header claims {keys} metadata keys", limit=f"{MAX_KEYS}")
    return tensors, keys


def _read_metadata(header: _Header, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = header.string(f"key {index} of {count}", MAX_NAME_BYTES)
        if key in metadata:
            header.fail(f"metadata key {key!r} stands twice")
        kind = header.u32(f"type of {key!r}")
        if kind == _STRING:
            metadata[key] = header.string(repr(key))
        elif kind == _ARRAY:
            metadata[key] = header.array(repr(key))
        elif kind in _SCALARS:
            metadata[key] = header.scalar(kind, repr(key))
        else:
            header.fail(f"{key!r} has the unknown value type {kind}", limit="types 0 to 12")
    return metadata


def _read_directory(header: _Header, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    """The tensors, their data checked to lie inside the file, aligned and apart from each other."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        header.fail(f"general.alignment is {alignment!r}", limit="a power of two, at least 8")
    entries = [_read_entry(header, index, count) for index in range(count)]
    base = -(-header.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in entries:
        if info.name in tensors:
            header.fail(f"tensor {info.name!r} stands twice")
        if info.offset % alignment:
            header.fail(f"tensor {info.name!r} starts at offset {info.offset}", limit=f"multiples of {alignment}")
        start = base + info.offset
        if start + info.nbytes > header.size:
            header.fail(
                f"truncated: tensor {info.name!r} ends at byte {start + info.nbytes}",
                limit=f"the file has {header.size} bytes",
            )
        tensors[info.name] = TensorInfo(info.name, info.shape, info.type, start, info.nbytes)
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            header.fail(f"tensors {before.name!r} and {after.name!r} overlap at byte {after.offset}")
    return tensors


def _read_entry(header: _Header, index: int, count: int) -> TensorInfo:
    """One entry of the directory; its offset is still relative to the data."""
    name = header.string(f"name of tensor {index} of {count}", MAX_NAME_BYTES)
    dims = header.u32(f"dimensions of {name!r}")
    if not 1 <= dims <= MAX_DIMS:
        header.fail(f"tensor {name!r} has {dims} dimensions", limit=f"1 to {MAX_DIMS}")
    sizes = [header.u64(f"shape of {name!r}") for _ in range(dims)]
    number = header.u32(f"type of {name!r}")
    offset = header.u64(f"offset of {name!r}")
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        header.fail(f"tensor {name!r} has the unknown type {number}", fix="use another quantization of this model")
    elements = math.prod(sizes)
    if elements == 0 or sizes[0] % block:
        header.fail(
            f"tensor {name!r} has shape {tuple(reversed(sizes))}",
            limit=f"sizes above 0, the last one a multiple of {block} for {kind.name}",
        )
    return TensorInfo(name, tuple(reversed(sizes)), kind.name, offset, elements // block * block_bytes)
