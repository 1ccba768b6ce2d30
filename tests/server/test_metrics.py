"""Counters and histograms of /metrics, read back by the Prometheus parser."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.messages import EngineFacts, Stats
from octavo.engine.outputs import ChoiceDelta
from octavo.engine.types import SamplingParams
from octavo.errors import EngineDead
from octavo.server.metrics import MAX_UNKNOWN_FIELDS, Metrics

FACTS = EngineFacts(1, "cpu", "float32", "reference", 10, 16, 512, 1000, 2000, 0.1, "fp8_e4m3")


def make(stats: Stats | None = None) -> Metrics:
    return Metrics("m", 512, lambda: stats or Stats(), lambda: FACTS)


def values(metrics: Metrics) -> dict[str, float]:
    """Sample name and labels other than model_name and engine, to value."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for one in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(one.labels.items()) if k not in ("model_name", "engine"))
            found[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    return found


def test_engine_stats_appear_under_vllms_names():
    stats = Stats(steps=7, running=2, waiting=3, blocks_used=4, blocks_total=16, preemptions=1, prompt_tokens=50,
                  generation_tokens=9, step_tokens=59,
                  prefix_queries=60, prefix_hits=32, cached_by_source={"device": 16, "host": 8, "disk": 4},
                  steps_by_tokens=[2, 4, 0, 0, 1] + [0] * 9)  # fmt: skip
    metrics = make(stats)
    shown = values(metrics)
    expected = {
        "vllm:num_requests_running": 2, "vllm:num_requests_waiting": 3, "vllm:kv_cache_usage_perc": 0.25,
        "vllm:num_preemptions_total": 1, "vllm:prompt_tokens_total": 50, "vllm:generation_tokens_total": 9,
        "vllm:prefix_cache_queries_total": 60, "vllm:prefix_cache_hits_total": 32,
        "vllm:prompt_tokens_cached_total": 28, "vllm:prompt_tokens_by_source_total{source=local_compute}": 22,
        "vllm:prompt_tokens_by_source_total{source=local_cache_hit}": 16,
        "vllm:prompt_tokens_by_source_total{source=external_kv_transfer}": 12,
        "vllm:prompt_tokens_cached_by_source_total{source=disk}": 4,
        "octavo:engine_steps_total": 7, "octavo:kv_blocks_used": 4, "octavo:kv_blocks_total": 16,
        "vllm:iteration_tokens_total_sum": 59, "vllm:iteration_tokens_total_count": 7,
        "vllm:iteration_tokens_total_bucket{le=1.0}": 2, "vllm:iteration_tokens_total_bucket{le=32.0}": 6,
        "vllm:iteration_tokens_total_bucket{le=64.0}": 7,
    }  # fmt: skip
    assert {name: shown[name] for name in expected} == expected
    assert not any("spec_decode" in name for name in shown), "this engine does not guess"
    [config] = (name for name in shown if name.startswith("vllm:cache_config_info{"))
    assert "num_gpu_blocks=10" in config and "cache_dtype=fp8_e4m3" in config


def test_guesses_are_counted_also_by_their_place():
    stats = Stats(drafts=4, draft_tokens=11, accepted_tokens=6, accepted_by_position=[3, 2, 1])
    facts = structs.replace(FACTS, num_speculative_tokens=4)
    shown = values(Metrics("m", 512, lambda: stats, lambda: facts))
    assert {name: value for name, value in shown.items() if "spec_decode" in name} == {
        "vllm:spec_decode_num_drafts_total": 4, "vllm:spec_decode_num_draft_tokens_total": 11,
        "vllm:spec_decode_num_accepted_tokens_total": 6,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=0}": 3,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=1}": 2,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=2}": 1,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=3}": 0,
    }  # fmt: skip


async def deltas(end: Exception | None = None) -> AsyncGenerator[list[ChoiceDelta], None]:
    yield [ChoiceDelta(0, "a", [1]), ChoiceDelta(1, "b", [2])]
    yield [ChoiceDelta(0, "c", [3]), ChoiceDelta(1, "", [4], finish_reason="stop")]
    if end is not None:
        raise end
    yield [ChoiceDelta(0, "d", [5], finish_reason="length")]


async def test_a_request_is_counted_once_a_choice():
    metrics = make()
    params = SamplingParams(n=2, max_tokens=3)
    async for _ in metrics.observed(deltas(), 11, params, lambda: [100.0, 100.5]):
        pass
    shown = values(metrics)
    assert shown["vllm:request_success_total{finished_reason=stop}"] == 1
    assert shown["vllm:request_success_total{finished_reason=length}"] == 1
    assert shown["vllm:request_success_total{finished_reason=abort}"] == 0
    assert shown["vllm:request_generation_tokens_sum"] == 5
    assert shown["vllm:request_prompt_tokens_sum"] == 22
    assert shown["vllm:time_to_first_token_seconds_count"] == 2
    assert shown["vllm:inter_token_latency_seconds_count"] == 3
    assert shown["vllm:request_queue_time_seconds_sum"] == pytest.approx(1.0)
    assert shown["vllm:request_params_n_sum"] == 2
    assert shown["vllm:request_max_num_generation_tokens_sum"] == 3
    for name in ("e2e_request_latency", "request_prefill_time", "request_decode_time", "request_inference_time"):
        assert shown[f"vllm:{name}_seconds_count"] == 2
    assert shown["vllm:request_time_per_output_token_seconds_count"] == 2


async def test_a_request_that_fails_or_is_left_is_counted_too():
    metrics = make()
    with pytest.raises(EngineDead):
        async for _ in metrics.observed(deltas(EngineDead("gone")), 1, SamplingParams(n=2), lambda: None):
            pass
    stream = metrics.observed(deltas(), 1, SamplingParams(n=2), lambda: None)
    await anext(stream)
    await stream.aclose()
    shown = values(metrics)
    assert shown["vllm:request_success_total{finished_reason=error}"] == 1
    assert shown["vllm:request_success_total{finished_reason=abort}"] == 2


def test_names_of_unknown_fields_are_bounded():
    metrics = make()
    assert metrics.unknown_field("a")
    assert not metrics.unknown_field("a")
    assert sum(metrics.unknown_field(f"f{i}") for i in range(1000)) == MAX_UNKNOWN_FIELDS - 1
    shown = {name: v for name, v in values(metrics).items() if name.startswith("octavo:unknown_request_fields_total")}
    assert len(shown) == MAX_UNKNOWN_FIELDS + 1
    assert shown["octavo:unknown_request_fields_total{field=a}"] == 2
    assert shown["octavo:unknown_request_fields_total{field=other}"] == 1000 - MAX_UNKNOWN_FIELDS + 1


@pytest.mark.parametrize("name", ["x" * 65, "x" * (1 << 20), "", "a b", "a\n", "{}", "ключ", "\ud800", "1st"])
def test_odd_names_of_unknown_fields_are_no_labels(name):
    metrics = make()
    assert not metrics.unknown_field(name)
    shown = [one for one in values(metrics) if one.startswith("octavo:unknown_request_fields_total")]
    assert shown == ["octavo:unknown_request_fields_total{field=other}"]
    assert metrics.unknown_field("stream_options.include-usage")


def test_probes_are_not_counted_as_requests():
    metrics = make()
    metrics.http("/health", "GET", 200, 0.1)
    metrics.http("/v1/models", "GET", 200, 0.1)
    metrics.http("/v1/models", "GET", 404, 0.1)
    shown = {name: v for name, v in values(metrics).items() if name.startswith("http_requests_total")}
    assert shown == {
        "http_requests_total{handler=/v1/models,method=GET,status=2xx}": 1,
        "http_requests_total{handler=/v1/models,method=GET,status=4xx}": 1,
    }
