"""Reader of safetensors headers (https://github.com/huggingface/safetensors#format) and of sharded checkpoints.

As strict as the format asks: offsets lie in the file, touch without gaps or overlaps, and end where the file ends.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any, NoReturn

from octavo.errors import BadModelFile
from octavo.formats.mapped import TensorFile, TensorInfo, map_file

MAX_HEADER_BYTES = 32 << 20
MAX_INDEX_BYTES = 64 << 20
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\.safetensors")

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


def read_safetensors(path: Path | str, copied: bool = False) -> TensorFile:
    """Raises BadModelFile naming what is wrong with the file. `copied` as in `map_file`."""
    path = Path(path)
    view = map_file(path, copied)
    size = len(view)
    if size < 8:
        _fail(path, f"truncated: {size} bytes", limit="at least 8 bytes")
    length: int = struct.unpack_from("<Q", view)[0]
    if length > min(size - 8, MAX_HEADER_BYTES):
        limit = f"{MAX_HEADER_BYTES} bytes, and the file has {size}"
        _fail(path, f"truncated or not safetensors: the header claims {length} bytes", limit=limit)
    header = parse_json(view[8 : 8 + length], f"{path}: the header")
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, fields, 8 + length) for name, fields in header.items()}
    _check_layout(path, list(tensors.values()), 8 + length, size)
    return TensorFile(path, tensors, view)


def read_checkpoint_files(directory: Path) -> list[TensorFile]:
    """The files of a directory's checkpoint: one alone, or the shards that the index names.

    Raises BadModelFile if there is none, or if index and shards disagree.
    """
    if (directory / SINGLE_NAME).exists():
        return [read_safetensors(directory / SINGLE_NAME)]
    if (directory / INDEX_NAME).exists():
        return _read_shards(directory)
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return [read_safetensors(found[0])]
    wanted = f"{len(found)} safetensors files without {INDEX_NAME}" if found else "no safetensors file"
    raise BadModelFile(f"{directory}: {wanted}", fix=f"bring {INDEX_NAME if found else SINGLE_NAME} too")


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """An object without repeated keys. Raises BadModelFile, its message starting with `what`."""
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as err:
        raise BadModelFile(f"{what} is not valid JSON ({err})", fix="download it again") from err
    if not isinstance(value, dict):
        raise BadModelFile(f"{what} is not a JSON object", fix="download it again")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key stands twice")
    return fields


def _fail(path: Path, cause: str, *, limit: str | None = None, fix: str = "download the file again") -> NoReturn:
    raise BadModelFile(f"{path}: {cause}", limit=limit, fix=fix)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(path: Path, name: str, fields: Any, base: int) -> TensorInfo:
    shown = repr(name[:200])
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"the header's entry of {shown} does not hold dtype, shape and data_offsets alone")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _fail(path, f"tensor {shown} has dtype {str(dtype)[:100]!r}", limit=f"one of {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 16 or not all(_is_size(n) for n in shape):
        _fail(path, f"tensor {shown} has shape {repr(shape)[:100]}", limit="at most 16 sizes from 0 up")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        _fail(path, f"tensor {shown} has data_offsets {repr(offsets)[:100]}", limit="two offsets from 0 up")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        _fail(path, f"tensor {shown} spans bytes {offsets[0]} to {offsets[1]}", limit=f"its shape needs {nbytes} bytes")
    return TensorInfo(name, tuple(shape), dtype, base + offsets[0], nbytes)


def _check_layout(path: Path, tensors: list[TensorInfo], base: int, size: int) -> None:
    """Each tensor starts where the one before ends, the first at `base`, and the last ends at `size`."""
    end = base
    for info in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if info.offset != end:
            how = "overlaps the one before it" if info.offset < end else "leaves a gap before it"
            _fail(path, f"tensor {info.name[:200]!r} at byte {info.offset} {how}", limit=f"byte {end}")
        end += info.nbytes
    if end > size:
        _fail(path, f"truncated: the tensors end at byte {end}", limit=f"the file has {size} bytes")
    if end < size:
        _fail(path, f"{size - end} bytes follow the last tensor", limit="none")


def _read_shards(directory: Path) -> list[TensorFile]:
    index = directory / INDEX_NAME
    raw = map_file(index)
    if len(raw) > MAX_INDEX_BYTES:
        _fail(index, f"the index has {len(raw)} bytes", limit=f"{MAX_INDEX_BYTES} bytes")
    weight_map = parse_json(raw[:], str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        _fail(index, "weight_map is not an object of tensor to file name")
    files = {}
    for name in sorted(set(weight_map.values())):
        if not _SHARD_NAME.fullmatch(name):
            _fail(index, f"weight_map names {name[:200]!r}", limit="a safetensors file in the same directory")
        if not (directory / name).exists():
            _fail(index, f"shard {name} is missing", fix=f"bring it to {directory}")
        files[name] = read_safetensors(directory / name)
    for tensor, name in weight_map.items():
        if tensor not in files[name].tensors:
            _fail(index, f"tensor {tensor[:200]!r} is not in {name}, where the index places it")
    for name, file in files.items():
        stray = [tensor for tensor in file.tensors if weight_map.get(tensor) != name]
        if stray:
            _fail(directory / name, f"tensor {stray[0][:200]!r} is not placed here by the index")
    return list(files.values())
