"""The GGUF reader: agrees with the `gguf` package on good files, names the fault of bad ones."""

import random
import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest

from octavo.errors import BadModelFile
from octavo.formats.gguf import read_gguf
from tests.matrix import SEED

U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack


def text(value: str) -> bytes:
    return U64(len(value.encode())) + value.encode()


def header(tensors: int = 0, keys: int = 0, *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + U32(version) + U64(tensors) + U64(keys)


def entry(name: str = "a", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(U64(d) for d in dims)
    return text(name) + U32(len(dims)) + sizes + U32(kind) + U64(offset)


def written(path, seed):
    """A file of every metadata type and some tensors, by the `gguf` package."""
    rng = random.Random(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", rng.randrange(256))
    writer.add_int8("a.i8", -rng.randrange(128))
    writer.add_uint16("a.u16", rng.randrange(1 << 16))
    writer.add_int16("a.i16", -rng.randrange(1 << 15))
    writer.add_uint32("a.u32", rng.randrange(1 << 32))
    writer.add_int32("a.i32", -rng.randrange(1 << 31))
    writer.add_uint64("a.u64", rng.randrange(1 << 64))
    writer.add_int64("a.i64", -rng.randrange(1 << 63))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", rng.random())
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "größer 大")
    writer.add_array("a.strings", [str(rng.random()) for _ in range(50)] + ["", "大"])
    writer.add_array("a.ints", [rng.randrange(-99, 99) for _ in range(50)])
    writer.add_array("a.floats", [0.25, -1.5])
    writer.add_array("a.bools", [True, False])
    tensors = {
        "one": np.array([rng.random() for _ in range(7)], np.float32),
        "two": np.array([[rng.random() for _ in range(64)] for _ in range(3)], np.float16),
    }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    quantized = gguf.quants.quantize(np.ones((5, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("three", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_agrees_with_the_gguf_package(tmp_path):
    path = tmp_path / "a.gguf"
    tensors = written(path, SEED)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.type, info.offset, info.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
    for name, values in tensors.items():
        np.testing.assert_array_equal(ours.data(name).view(values.dtype), values.ravel())


def test_version_2_is_read(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(header(keys=1, version=2) + text("k") + U32(4) + U32(7))
    assert read_gguf(path).metadata == {"k": 7}


ARRAY = text("k") + U32(9)
BAD = {
    "empty": (b"", "empty"),
    "short": (b"GG", "truncated: the magic"),
    "magic": (header(magic=b"GGML"), "not a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "Git LFS pointer"),
    "version1": (header(version=1), "GGUF version 1"),
    "version9": (header(version=9), "GGUF version 9"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
    "tensors": (header(tensors=1 << 40), "claims 1099511627776 tensors"),
    "keys": (header(keys=1 << 40), "claims 1099511627776 metadata keys"),
    "no keys": (header(keys=3), "length of key 0 of 3"),
    "long key": (header(keys=1) + U64(1 << 62), "claims to be 4611686018427387904 bytes"),
    "cut key": (header(keys=1) + U64(100) + b"abc", "truncated: key 0"),
    "key not utf-8": (header(keys=1) + U64(2) + b"\xff\xfe" + U32(4) + U32(1), "not UTF-8"),
    "key twice": (header(keys=2) + 2 * (text("k") + U32(4) + U32(1)), "'k' stands twice"),
    "value type": (header(keys=1) + text("k") + U32(13), "unknown value type 13"),
    "bool": (header(keys=1) + text("k") + U32(7) + b"\x02", "bool of value 2"),
    "long string": (header(keys=1) + text("k") + U32(8) + U64(1 << 60), "claims to be"),
    "array count": (header(keys=1) + ARRAY + U32(4) + U64(1 << 60), "elements"),
    "array cut": (header(keys=1) + ARRAY + U32(4) + U64(1000), "truncated: 'k'"),
    "strings cut": (header(keys=1) + ARRAY + U32(8) + U64(2) + text("a") + U64(9) + b"abc", "string 1 of 'k'"),
    "strings utf-8": (header(keys=1) + ARRAY + U32(8) + U64(1) + U64(1) + b"\xff", "string 0 of 'k'"),
    "nested": (header(keys=1) + ARRAY + U32(9) + U64(1) + bytes(32), "array of type 9"),
    "alignment": (header(keys=1) + text("general.alignment") + U32(4) + U32(24), "alignment is 24"),
    "alignment 0": (header(keys=1) + text("general.alignment") + U32(4) + U32(0), "alignment is 0"),
    "dims": (header(tensors=1) + entry(dims=(1, 1, 1, 1, 1)), "5 dimensions"),
    "zero": (header(tensors=1) + entry(dims=(0,)), "shape (0,)"),
    "block": (header(tensors=1) + entry(dims=(33,), kind=8), "multiple of 32 for Q8_0"),
    "type": (header(tensors=1) + entry(kind=999), "unknown type 999"),
    "offset": (header(tensors=1) + entry(offset=5) + bytes(500), "offset 5"),
    "no data": (header(tensors=1) + entry(), "truncated: tensor 'a'"),
    "huge": (header(tensors=1) + entry(dims=(1 << 62, 1 << 62)), "truncated: tensor 'a'"),
    "far": (header(tensors=1) + entry(offset=1 << 63), "truncated: tensor 'a'"),
    "twice": (header(tensors=2) + 2 * entry() + bytes(500), "'a' stands twice"),
    "overlap": (header(tensors=2) + entry() + entry("b", offset=32) + bytes(500), "overlap"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_names_the_fault(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(BadModelFile) as caught:
        read_gguf(path)
    said = str(caught.value)
    assert message in said
    assert str(path) in said
    assert "fix:" in said
    assert "\n" not in said


def test_missing_file_and_directory(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(BadModelFile, match="cannot be read"):
            read_gguf(path)


def test_every_truncation_is_named(tmp_path):
    """Cut at every byte up to the last one of the last tensor (padding follows)."""
    whole, cut = tmp_path / "a.gguf", tmp_path / "cut.gguf"
    written(whole, SEED)
    content = whole.read_bytes()
    end = max(t.offset + t.nbytes for t in read_gguf(whole).tensors.values())
    for size in range(end):
        cut.write_bytes(content[:size])
        with pytest.raises(BadModelFile):
            read_gguf(cut)


def test_flipped_bytes_never_surprise(tmp_path):
    """BadModelFile or success, in little time and memory, whatever bytes of the header are wrong."""
    whole, broken = tmp_path / "a.gguf", tmp_path / "broken.gguf"
    rng = random.Random(SEED)
    written(whole, SEED)
    content = whole.read_bytes()
    end = min(t.offset for t in read_gguf(whole).tensors.values())
    start = time.monotonic()
    tracemalloc.start()
    for _ in range(1500):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(end)] = rng.randrange(256)
        broken.write_bytes(changed)
        try:
            read_gguf(broken)
        except BadModelFile:
            pass
        except Exception as err:
            pytest.fail(f"OCTAVO_SEED={SEED}: {err!r}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20, f"OCTAVO_SEED={SEED}"
    assert time.monotonic() - start < 60, f"OCTAVO_SEED={SEED}"
