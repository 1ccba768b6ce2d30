"""The CPU device: with and without its library, what it says of itself, and memory that costs nothing unwritten."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from octavo.backends.base import allocating, open_device
from octavo.backends.cpu import lib, limits
from octavo.backends.cpu.device import CpuDevice
from octavo.backends.cpu.memory import Arena, lazy_zeros
from octavo.backends.cpu.ops import CpuOps, PanelKVCache
from octavo.backends.kv import KV_FORMATS, FullAttention, KVGroup
from octavo.backends.reference import Ops
from octavo.engine.pages import KVLayout
from octavo.engine.runner import allocate_caches
from octavo.errors import DeviceUnavailable, NotEnoughMemory, UsageError
from tests.backend.conftest import ISAS, library


@pytest.fixture
def fresh_library(monkeypatch):
    """`lib` as in a new process, before and after."""
    monkeypatch.delenv("OCTAVO_CPU_ISA", raising=False)
    for function in (lib.load, lib.kernels):
        function.cache_clear()
    yield
    for function in (lib.load, lib.kernels):
        function.cache_clear()


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("fresh_library", "torch_threads")
def test_opens_with_kernels():
    device = open_device("cpu", threads=3)
    assert isinstance(device, CpuDevice)
    assert isinstance(device.ops, CpuOps)
    assert device.kernels == ISAS[0]
    assert library().threads == 3 and torch.get_num_threads() == 1


@pytest.mark.usefixtures("fresh_library", "torch_threads")
@pytest.mark.parametrize("isa", ISAS)
def test_environment_lowers_the_instruction_set(monkeypatch, isa):
    monkeypatch.setenv("OCTAVO_CPU_ISA", isa)
    device = CpuDevice()
    device.open(0, 1)
    assert device.kernels == isa


@pytest.mark.usefixtures("fresh_library", "torch_threads")
def test_unknown_instruction_set(monkeypatch):
    monkeypatch.setenv("OCTAVO_CPU_ISA", "sse9")
    with pytest.raises(UsageError, match=r"OCTAVO_CPU_ISA is sse9; limit: this machine runs .*generic"):
        CpuDevice().open(0, 1)


@pytest.mark.usefixtures("fresh_library", "torch_threads")
def test_without_library_warns_and_uses_the_reference(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(lib, "__file__", str(tmp_path / "lib.py"))
    assert not lib.available()
    device = CpuDevice()
    with caplog.at_level(logging.WARNING):
        device.open(0, 2)
    assert type(device.ops) is Ops and device.kernels == "reference"
    assert "not built" in caplog.text
    assert device.allocate_kv(FullAttention(2, 8), 3, 16, torch.bfloat16).k.shape == (3, 16, 2, 8)


@pytest.mark.usefixtures("fresh_library")
@pytest.mark.parametrize("content", [None, b"not a library"])
def test_a_broken_library_is_not_a_missing_one(monkeypatch, tmp_path, content):
    path = tmp_path / "liboctavo_cpu.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("OCTAVO_CPU_LIBRARY", str(path))
    with pytest.raises(DeviceUnavailable, match="cannot be loaded"):
        CpuDevice().open(0, 1)


def test_another_version_is_refused(monkeypatch):
    built = lib.ABI_VERSION
    monkeypatch.setattr(lib, "ABI_VERSION", 999)
    with pytest.raises(DeviceUnavailable, match=f"interface version {built}; limit: this Octavo needs 999"):
        lib.Library(Path(lib.__file__).with_name("liboctavo_cpu.so"))


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("dim", [64, 72, 256])
def test_kv_bytes_are_those_taken(dim):
    device = CpuDevice()
    device.open(0, 1)
    spec = FullAttention(3, dim)
    for dtype, form in itertools.product(device.dtypes, (None, *KV_FORMATS.values())):
        cache = device.allocate_kv(spec, 5, 32, dtype, form)
        assert cache.k.nbytes + cache.v.nbytes == 5 * device.kv_bytes_per_page(spec, 32, dtype, form)
        assert isinstance(cache, PanelKVCache) == (dtype is torch.bfloat16)


def test_odd_head_sizes_go_to_the_reference():
    device = CpuDevice()
    device.open(0, 1)
    assert not isinstance(device.allocate_kv(FullAttention(1, 20), 2, 16, torch.bfloat16), PanelKVCache)


def test_unwritten_memory_costs_nothing():
    process = psutil.Process()
    before = process.memory_info().rss
    zeros = lazy_zeros((1 << 28,), torch.bfloat16)
    assert process.memory_info().rss - before < 8 << 20
    assert zeros[:: 1 << 20].eq(0).all()


REFUSED = {
    "a mapping": lambda: lazy_zeros((1 << 56,), torch.bfloat16),
    "torch": lambda: torch.empty(1 << 56),
    "numpy": lambda: np.empty(1 << 60, np.int8),
    "Python": lambda: bytearray(1 << 62),
}


@pytest.mark.parametrize("allocate", REFUSED.values(), ids=REFUSED)
def test_memory_that_the_system_refuses_is_a_typed_error(allocate):
    said = r"^the system refused memory for all: .*; fix: wait$"
    with pytest.raises(NotEnoughMemory, match=said) as caught, allocating("all", "wait"):
        allocate()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("ours"), OSError(2, "gone"), ValueError("x")])
def test_other_errors_pass(error):
    with pytest.raises(type(error), match=str(error.args[-1])), allocating("all", "wait"):
        raise error


def test_a_kv_cache_that_the_system_refuses():
    """Though `memory` said that it fits, as other programs may take it meanwhile."""
    device, blocks = CpuDevice(), 1 << 48
    device.open(0, 1)
    group = KVGroup(FullAttention(2, 64), (0,))
    with pytest.raises(NotEnoughMemory, match="memory for the KV cache"):
        allocate_caches((group,), device, KVLayout(16, (group.spec,), (blocks,)), torch.bfloat16)


def test_a_limit_of_addresses_counts():
    code = "from octavo.backends.cpu.limits import memory; print(*memory())"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", limit + code], env=environment, capture_output=True, text=True)
    total, free = map(int, done.stdout.split())
    assert total == 1 << 30, done
    assert 0 < free < 1 << 30


def test_arena_pieces_are_aligned_and_apart():
    arena = Arena()
    pieces = [arena.empty(n, torch.bfloat16) for n in (1, 33, 1000, 7)]
    for i, piece in enumerate(pieces):
        piece.fill_(i)
        assert piece.data_ptr() % 64 == 0
    assert all(piece.eq(i).all() for i, piece in enumerate(pieces))
    large = arena.empty((300 << 20) // 2, torch.bfloat16)
    assert large.numel() == (300 << 20) // 2


def test_quota_of_control_groups(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
    assert limits.cpu_quota([first, second]) is None
    (first / "cpu.max").write_text("max 100000\n")
    assert limits.cpu_quota([first, second]) is None
    (first / "cpu.max").write_text("250000 100000\n")
    (second / "cpu.cfs_quota_us").write_text("150000\n")
    (second / "cpu.cfs_period_us").write_text("100000\n")
    assert limits.cpu_quota([first]) == 2.5
    assert limits.cpu_quota([first, second]) == 1.5
    (second / "cpu.cfs_quota_us").write_text("-1\n")
    assert limits.cpu_quota([second]) is None


def test_default_threads_follow_the_affinity_mask():
    code = "from octavo.backends.cpu.limits import default_threads; print(default_threads())"
    one = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); "
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", one + code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done
