"""What /metrics shows of the host and disk tiers of the KV cache, where there is a host tier: under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from octavo.engine.messages import Stats
from octavo.wire import metric_names as names


def offload_metrics(stats: Stats, label_names: list[str], labels: list[str]) -> Iterator[Metric]:
    counts = stats.offload
    if counts is None:
        return
    external = stats.cached_by_source.get("host", 0) + stats.cached_by_source.get("disk", 0)
    asked = stats.prefix_queries - stats.cached_by_source.get("device", 0)
    used, total = stats.host_blocks_used, stats.host_blocks_total
    for name, text, value in (
        (names.KV_OFFLOAD_HOST_USAGE, "Share of host slots in use, 0 to 1.", used / (total or 1)),
        (names.KV_HOST_BLOCKS_USED, "Host slots that hold a KV block.", used),
        (names.KV_HOST_BLOCKS_TOTAL, "Host slots there are.", total),
        (names.KV_DISK_BYTES_USED, "Bytes of KV blocks on disk.", stats.disk_bytes_used),
    ):
        gauge = GaugeMetricFamily(name, text, labels=label_names)
        gauge.add_metric(labels, value)
        yield gauge
    for name, text, value in (
        (names.PREEMPTIONS_SWAPPED, "Preemptions whose blocks were saved on the host.", stats.preemptions_swapped),
        (names.EXTERNAL_PREFIX_CACHE_QUERIES, "Tokens looked up beyond the device.", asked),
        (names.EXTERNAL_PREFIX_CACHE_HITS, "Tokens found on the host or on disk.", external),
        (names.KV_OFFLOAD_STORE_BYTES, "Bytes saved from the device to the host.", counts.store_bytes),
        (names.KV_OFFLOAD_STORE_TIME, "Seconds that this took.", counts.store_s),
        (names.KV_OFFLOAD_LOAD_BYTES, "Bytes loaded from the host to the device.", counts.load_bytes),
        (names.KV_OFFLOAD_LOAD_TIME, "Seconds that this took.", counts.load_s),
        (names.KV_OFFLOAD_STORES_SKIPPED, "Blocks given up as no host slot was free.", counts.stores_skipped),
    ):
        yield _counter(name, text, label_names, labels, value)
    for name, text, value in (
        (names.KV_TIERING_WRITE_BYTES, "Bytes of KV blocks written.", counts.disk_write_bytes),
        (names.KV_TIERING_WRITE_TIME, "Seconds that this took.", counts.disk_write_s),
        (names.KV_TIERING_READ_BYTES, "Bytes of KV blocks read.", counts.disk_read_bytes),
        (names.KV_TIERING_READ_TIME, "Seconds that this took.", counts.disk_read_s),
        (names.KV_TIERING_BLOCKS_DROPPED, "Blocks not written as too many waited.", counts.disk_writes_dropped),
        (names.KV_TIERING_READ_FAILURES, "Blocks gone or damaged when wanted.", counts.disk_read_failures),
    ):
        yield _counter(name, text, [*label_names, "tier"], [*labels, "disk"], value)


def _counter(name: str, text: str, label_names: list[str], labels: list[str], value: float) -> Metric:
    counter = CounterMetricFamily(name, text, labels=label_names)
    counter.add_metric(labels, value)
    return counter
