"""The settings of the host and disk tiers: what is refused, how much there is, and what /metrics shows."""

from __future__ import annotations

import pytest

from octavo.config import GIB, EngineArgs, ModelFacts, resolve
from octavo.engine.messages import OffloadCounts, Stats
from octavo.engine.sizing import host_slots
from octavo.errors import NotEnoughMemory, UsageError
from octavo.server.offload_metrics import offload_metrics
from tests.engine.test_executor import Memory, config

FACTS = ModelFacts("m", 128, 100, ())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "--kv-offloading-size"),
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"kv_offloading_size": 1.0, "tensor_parallel_size": 2}, "--tensor-parallel-size"),
    ],
)
def test_a_folder_that_could_not_be_used_is_refused(settings, named):
    with pytest.raises(UsageError, match=named) as caught:
        resolve(EngineArgs("m", kv_offloading_dir="x", **settings), FACTS)
    assert caught.value.param == "kv_offloading_dir"


def test_a_folder_is_named_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = resolve(EngineArgs("m", kv_offloading_dir="kv", kv_offloading_size=0.5), FACTS)
    assert found.kv_offloading_dir == str(tmp_path / "kv")
    assert (found.kv_offloading_bytes, found.kv_offloading_dir_bytes) == (GIB // 2, 16 * GIB)


def test_slots_are_shared_out_as_the_devices_blocks_are():
    device = Memory(1 << 40, 1 << 39)
    assert host_slots(config(), device, (30, 10), (100, 400)) == (0, 0)
    asked = config(kv_offloading_bytes=14_000)
    assert host_slots(asked, device, (30, 10), (100, 400)) == (60, 20)
    halved = config(kv_offloading_bytes=14_000, tensor_parallel_size=2)
    assert host_slots(halved, device, (30, 10), (100, 400)) == (30, 10)
    with pytest.raises(NotEnoughMemory, match="not one KV block"):
        host_slots(config(kv_offloading_bytes=600), device, (30, 10), (100, 400))
    with pytest.raises(NotEnoughMemory, match="--kv-offloading-size asks for"):
        host_slots(asked, Memory(1 << 40, 20_999), (30, 10), (100, 400))
    assert host_slots(asked, Memory(1 << 40, 21_000), (30, 10), (100, 400)) == (60, 20)


def test_metrics_are_those_of_vllm_and_only_there_with_a_tier():
    assert not list(offload_metrics(Stats(), ["engine"], ["0"]))
    stats = Stats(
        prefix_queries=100, cached_by_source={"device": 30, "host": 20, "disk": 10}, host_blocks_used=1,
        host_blocks_total=4, offload=OffloadCounts(load_bytes=7, disk_read_bytes=5),
    )  # fmt: skip
    shown = {s.name: (s.labels, s.value) for m in offload_metrics(stats, ["engine"], ["0"]) for s in m.samples}
    assert shown["vllm:external_prefix_cache_queries_total"][1] == 70
    assert shown["vllm:external_prefix_cache_hits_total"][1] == 30
    assert shown["vllm:kv_offload_load_bytes_total"] == ({"engine": "0"}, 7)
    assert shown["vllm:kv_offload_tiering_read_bytes_total"] == ({"engine": "0", "tier": "disk"}, 5)
    assert shown["vllm:kv_offload_cpu_cache_usage_perc"][1] == 0.25
