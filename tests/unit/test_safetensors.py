"""The safetensors reader: agrees with the `safetensors` package on good files, names the fault of bad ones."""

import json
import random
import struct
import time
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

from octavo.errors import BadModelFile
from octavo.formats.safetensors import read_checkpoint_files, read_safetensors
from tests.matrix import SEED


def packed(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def write_some(path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED)
    tensors = {
        "a.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": rng.integers(0, 9, (2, 2, 2)),
        "scalar": np.array(1.5),
        "empty": np.zeros((0, 4), np.float32),
    }
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def test_agrees_with_the_safetensors_package(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = write_some(path)
    file = read_safetensors(path)
    assert set(file.tensors) == set(tensors)
    for name, values in tensors.items():
        assert file.tensors[name].shape == values.shape
        np.testing.assert_array_equal(file.data(name).view(values.dtype).reshape(values.shape), values)


def without(key: str) -> dict[str, object]:
    return {k: v for k, v in entry(0, 8).items() if k != key}


BAD = {
    "empty": (b"", "empty"),
    "short": (b"abc", "truncated: 3 bytes"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "Git LFS pointer"),
    "lying length": (struct.pack("<Q", 1 << 62) + b"{}", "the header claims 4611686018427387904 bytes"),
    "length one over": (struct.pack("<Q", 3) + b"{}", "the header claims 3 bytes"),
    "pickle": (b"\x80\x02}q\x00" + bytes(100), "header claims"),
    "not json": (packed(b"{]"), "not valid JSON"),
    "not utf-8": (packed(b'{"\xff": 1}'), "not valid JSON"),
    "not an object": (packed([]), "not a JSON object"),
    "deep": (packed(b"[" * 100_000), "not valid JSON"),
    "twice": (packed(b'{"a": 1, "a": 2}'), "a key stands twice"),
    "no dtype": (packed({"a": without("dtype")}, bytes(8)), "does not hold dtype"),
    "surplus field": (packed({"a": {**entry(0, 8), "x": 1}}, bytes(8)), "does not hold dtype"),
    "entry": (packed({"a": 5}), "does not hold dtype"),
    "dtype": (packed({"a": entry(0, 8, dtype="F13")}, bytes(8)), "dtype 'F13'"),
    "dtype kind": (packed({"a": {**entry(0, 8), "dtype": []}}, bytes(8)), "dtype '[]'"),
    "negative": (packed({"a": entry(0, 8, [-2])}, bytes(8)), "shape [-2]"),
    "bool size": (packed({"a": entry(0, 4, [True])}, bytes(4)), "shape [True]"),
    "float size": (packed({"a": entry(0, 4, [1.0])}, bytes(4)), "shape [1.0]"),
    "shape": (packed({"a": entry(0, 8, [3])}, bytes(8)), "its shape needs 12 bytes"),
    "overflow": (packed({"a": entry(0, 0, [1 << 62, 4])}), "its shape needs"),
    "backwards": (packed({"a": {**entry(0, 8), "data_offsets": [8, 0]}}, bytes(8)), "spans bytes 8 to 0"),
    "one offset": (packed({"a": {**entry(0, 8), "data_offsets": [0]}}, bytes(8)), "two offsets"),
    "truncated": (packed({"a": entry(0, 8)}, bytes(7)), "truncated: the tensors end"),
    "trailing": (packed({"a": entry(0, 8)}, bytes(9)), "1 bytes follow"),
    "overlap": (packed({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "'b' at byte"),
    "gap": (packed({"a": entry(0, 8), "b": entry(12, 16)}, bytes(16)), "leaves a gap"),
    "late": (packed({"a": entry(4, 8)}, bytes(8)), "leaves a gap"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_names_the_fault(tmp_path, content, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadModelFile) as caught:
        read_safetensors(path)
    said = str(caught.value)
    assert message in said
    assert str(path) in said
    assert "fix:" in said
    assert len(said) < 1000
    assert "\n" not in said


def test_every_truncation_is_named(tmp_path):
    whole, cut = tmp_path / "a.safetensors", tmp_path / "cut.safetensors"
    write_some(whole)
    content = whole.read_bytes()
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        with pytest.raises(BadModelFile):
            read_safetensors(cut)


def test_flipped_bytes_never_surprise(tmp_path):
    whole, broken = tmp_path / "a.safetensors", tmp_path / "broken.safetensors"
    rng = random.Random(SEED)
    write_some(whole)
    content = whole.read_bytes()
    start = time.monotonic()
    tracemalloc.start()
    for _ in range(1500):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(len(content))] = rng.randrange(256)
        broken.write_bytes(changed)
        try:
            read_safetensors(broken)
        except BadModelFile:
            pass
        except Exception as err:
            pytest.fail(f"OCTAVO_SEED={SEED}: {err!r}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20, f"OCTAVO_SEED={SEED}"
    assert time.monotonic() - start < 60, f"OCTAVO_SEED={SEED}"


def write_shards(directory):
    """Two shards of one tensor each, and their index."""
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for tensor, name in names.items():
        safetensors.numpy.save_file({tensor: np.ones(3, np.float32)}, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return names


def test_shards_are_read_through_their_index(tmp_path):
    write_shards(tmp_path)
    assert [set(file.tensors) for file in read_checkpoint_files(tmp_path)] == [{"a"}, {"b"}]


INDEX = {
    "not json": ("{", "not valid JSON"),
    "no map": ('{"metadata": {}}', "weight_map is not an object"),
    "values": ('{"weight_map": {"a": 5}}', "weight_map is not an object"),
    "escape": ('{"weight_map": {"a": "../model-1.safetensors"}}', "in the same directory"),
    "nul": ('{"weight_map": {"a": "x\\u0000.safetensors"}}', "in the same directory"),
    "surrogate": ('{"weight_map": {"a": "\\ud800.safetensors"}}', "in the same directory"),
    "pickle": ('{"weight_map": {"a": "model.bin"}}', "in the same directory"),
    "missing shard": ('{"weight_map": {"a": "model-9.safetensors"}}', "shard model-9.safetensors is missing"),
    "missing tensor": ('{"weight_map": {"a": "model-1.safetensors", "z": "model-2.safetensors"}}', "'z' is not in"),
    "stray": ('{"weight_map": {"a": "model-1.safetensors"}}', None),
    "unplaced": ('{"weight_map": {"b": "model-2.safetensors"}, "metadata": null}', None),
    "wrong shard": ('{"weight_map": {"a": "model-2.safetensors"}}', "'a' is not in model-2"),
}


@pytest.mark.parametrize(("index", "message"), INDEX.values(), ids=INDEX.keys())
def test_index_and_shards_must_agree(tmp_path, index, message):
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    if message is None:
        assert len(read_checkpoint_files(tmp_path)) == 1
        return
    with pytest.raises(BadModelFile, match=message):
        read_checkpoint_files(tmp_path)


def test_tensor_that_the_index_does_not_place(tmp_path):
    names = write_shards(tmp_path)
    safetensors.numpy.save_file({"a": np.ones(3), "extra": np.ones(1)}, tmp_path / names["a"])
    with pytest.raises(BadModelFile, match="'extra' is not placed here"):
        read_checkpoint_files(tmp_path)


def test_directories_without_one_clear_checkpoint(tmp_path):
    with pytest.raises(BadModelFile, match="no safetensors file"):
        read_checkpoint_files(tmp_path)
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(BadModelFile, match="2 safetensors files without"):
        read_checkpoint_files(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    assert len(read_checkpoint_files(tmp_path)) == 1
