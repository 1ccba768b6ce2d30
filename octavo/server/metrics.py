"""What /metrics shows: gauges and counters read from the engine's stats at each scrape, and what requests told.

One registry an application, so that two servers in one process do not mix.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.engine.messages import EngineFacts, Stats
from octavo.engine.outputs import ChoiceDelta
from octavo.engine.types import SamplingParams
from octavo.server.offload_metrics import offload_metrics
from octavo.wire import metric_names as names

MAX_UNKNOWN_FIELDS = 64
"""distinct names kept as labels; further ones count as "other" """
FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""what may become a label: it comes from clients, and stays until the server ends"""
QUIET_HANDLERS = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
LABELS = ["model_name", "engine"]
Timing = Callable[[], list[float] | None]
"""when a request was queued and first scheduled, in seconds since the epoch, once known"""


class EngineCollector(Collector):
    """The engine's own counters, as they stood in its latest message."""

    def __init__(
        self, model: str, stats: Callable[[], Stats], facts: Callable[[], EngineFacts], max_loras: int | None
    ) -> None:
        self.labels, self.stats, self.facts, self.max_loras = [model, "0"], stats, facts, max_loras

    def collect(self) -> Iterator[Metric]:
        stats = self.stats()
        gauges = [
            (names.NUM_RUNNING, "Sequences that take part in steps.", stats.running),
            (names.NUM_WAITING, "Sequences that wait for their first step.", stats.waiting),
            (names.KV_CACHE_USAGE, "Share of KV blocks in use, 0 to 1.", stats.blocks_used / (stats.blocks_total or 1)),
            (names.KV_BLOCKS_USED, "KV blocks in use.", stats.blocks_used),
            (names.KV_BLOCKS_TOTAL, "KV blocks there are.", stats.blocks_total),
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self.labels, value)
            yield gauge
        cached = sum(stats.cached_by_source.values())
        counters = [
            (names.PREEMPTIONS, "Sequences set back because KV blocks ran out.", stats.preemptions),
            (names.PROMPT_TOKENS, "Prompt tokens of the sequences that have started.", stats.prompt_tokens),
            (names.PROMPT_TOKENS_CACHED, "Prompt tokens that were not computed.", cached),
            (names.PREFIX_CACHE_QUERIES, "Tokens looked up in the prefix cache.", stats.prefix_queries),
            (names.PREFIX_CACHE_HITS, "Tokens found in the prefix cache.", stats.prefix_hits),
            (names.GENERATION_TOKENS, "Tokens generated.", stats.generation_tokens),
            (names.ENGINE_STEPS, "Steps of the engine.", stats.steps),
        ]
        for name, text, count in counters:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self.labels, count)
            yield counter
        yield self._rejections(stats)
        yield from self._prompt_sources(stats)
        yield from offload_metrics(stats, LABELS, self.labels)
        yield from self._speculation(stats)
        yield self._iteration_tokens(stats)
        yield self._cache_config()
        if self.max_loras:
            yield self._lora_requests(stats, self.max_loras)

    def _rejections(self, stats: Stats) -> Metric:
        text = "Requests refused at admission, by the limit that refused them."
        counter = CounterMetricFamily(names.ADMISSION_REJECTIONS, text, labels=["model_name", "reason"])
        for reason in sorted({"max_num_queued_reqs", "max_num_queued_tokens"} | set(stats.rejected)):
            counter.add_metric([self.labels[0], reason], stats.rejected.get(reason, 0))
        return counter

    def _prompt_sources(self, stats: Stats) -> Iterator[Metric]:
        """Host memory and disk are external in vLLM's words, as a connector brings them there."""
        lying = {source: stats.cached_by_source.get(source, 0) for source in ("device", "host", "disk")}
        by_source = {
            "local_compute": stats.prompt_tokens - sum(lying.values()), "local_cache_hit": lying["device"],
            "external_kv_transfer": lying["host"] + lying["disk"],
        }  # fmt: skip
        for name, text, values in (
            (names.PROMPT_TOKENS_BY_SOURCE, "Prompt tokens, by how they came into the KV cache.", by_source),
            (names.PROMPT_TOKENS_CACHED_BY_SOURCE, "Prompt tokens that were not computed, by where they lay.", lying),
        ):
            counter = CounterMetricFamily(name, text, labels=[*LABELS, "source"])
            for source, count in values.items():
                counter.add_metric([*self.labels, source], count)
            yield counter

    def _speculation(self, stats: Stats) -> Iterator[Metric]:
        """As in vLLM, only of an engine that guesses."""
        if not self.facts().num_speculative_tokens:
            return
        for name, text, value in (
            (names.SPEC_DECODE_DRAFTS, "Times that tokens were guessed.", stats.drafts),
            (names.SPEC_DECODE_DRAFT_TOKENS, "Tokens guessed.", stats.draft_tokens),
            (names.SPEC_DECODE_ACCEPTED_TOKENS, "Guesses that were right.", stats.accepted_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self.labels, value)
            yield counter
        per_position = CounterMetricFamily(
            names.SPEC_DECODE_ACCEPTED_PER_POSITION, "Guesses that were right, by their place.",
            labels=[*LABELS, "position"],
        )  # fmt: skip
        for position in range(self.facts().num_speculative_tokens):
            right = stats.accepted_by_position[position : position + 1] or [0]
            per_position.add_metric([*self.labels, str(position)], right[0])
        yield per_position

    def _iteration_tokens(self, stats: Stats) -> Metric:
        """Counted by the engine, as it sends no message after a step that made no token."""
        bounds = [*map(floatToGoString, names.ITERATION_BUCKETS), "+Inf"]
        counts = list(accumulate(stats.steps_by_tokens)) or [0] * len(bounds)
        histogram = HistogramMetricFamily(names.ITERATION_TOKENS, "Tokens computed in a step.", labels=LABELS)
        histogram.add_metric(self.labels, list(zip(bounds, counts, strict=True)), stats.step_tokens)
        return histogram

    def _cache_config(self) -> Metric:
        facts = self.facts()
        values = {
            "block_size": facts.block_size, "cache_dtype": facts.kv_cache_dtype,
            "enable_prefix_caching": facts.prefix_caching,
            "num_gpu_blocks": facts.num_blocks, "kv_cache_memory_bytes": facts.kv_cache_bytes, "engine": "0",
        }  # fmt: skip
        info = GaugeMetricFamily(names.CACHE_CONFIG_INFO, "Settings of the KV cache.", labels=list(values))
        info.add_metric([str(v) for v in values.values()], 1)
        return info

    def _lora_requests(self, stats: Stats, max_loras: int) -> Metric:
        """As in vLLM: the names stand in labels, and the value is the time."""
        info = GaugeMetricFamily(
            names.LORA_REQUESTS_INFO, "Adapters that running and waiting requests use.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )  # fmt: skip
        waiting, running = ",".join(stats.adapters_waiting), ",".join(stats.adapters_running)
        info.add_metric([str(max_loras), waiting, running], time.time())
        return info


class Metrics:
    """Everything counted in this process, and the registry that shows it together with the engine's."""

    def __init__(
        self, model: str, longest: int, stats: Callable[[], Stats], facts: Callable[[], EngineFacts],
        max_loras: int | None = None,
    ) -> None:  # fmt: skip
        """`max_loras` is None where adapters are not enabled."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model, stats, facts, max_loras))
        self._model = model
        lengths = names.length_buckets(longest)
        self.first_token = self._histogram(names.TIME_TO_FIRST_TOKEN, names.FIRST_TOKEN_BUCKETS)
        self.inter_token = self._histogram(names.INTER_TOKEN_LATENCY, names.TOKEN_BUCKETS)
        self.per_output_token = self._histogram(names.TIME_PER_OUTPUT_TOKEN, names.TOKEN_BUCKETS)
        self.e2e = self._histogram(names.E2E_LATENCY, names.REQUEST_BUCKETS)
        self.queue = self._histogram(names.QUEUE_TIME, names.REQUEST_BUCKETS)
        self.inference = self._histogram(names.INFERENCE_TIME, names.REQUEST_BUCKETS)
        self.prefill = self._histogram(names.PREFILL_TIME, names.REQUEST_BUCKETS)
        self.decode = self._histogram(names.DECODE_TIME, names.REQUEST_BUCKETS)
        self.prompt_tokens = self._histogram(names.REQUEST_PROMPT_TOKENS, lengths)
        self.generation_tokens = self._histogram(names.REQUEST_GENERATION_TOKENS, lengths)
        self.max_generation_tokens = self._histogram(names.REQUEST_MAX_GENERATION_TOKENS, lengths)
        self.params_n = self._histogram(names.REQUEST_PARAMS_N, names.N_BUCKETS)
        self.params_max_tokens = self._histogram(names.REQUEST_PARAMS_MAX_TOKENS, lengths)
        self._finished = Counter(
            names.REQUEST_SUCCESS, "Finished choices.", [*LABELS, "finished_reason"], registry=self.registry
        )
        for reason in ("stop", "length", "repetition", "abort", "error"):
            self._finished.labels(model, "0", reason)
        self._unknown = Counter(
            names.UNKNOWN_FIELDS, "Request fields that were ignored.", ["field"], registry=self.registry
        )
        self._unknown_seen: set[str] = set()
        http_labels = ["handler", "method", "status"]
        self._http = Counter(names.HTTP_REQUESTS, "Answered requests.", http_labels, registry=self.registry)
        self._http_seconds = Histogram(
            names.HTTP_DURATION, "Seconds to the end of the answer.", ["handler", "method"], registry=self.registry
        )

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, name.split(":")[1], LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(self._model, "0")

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        if handler not in QUIET_HANDLERS:
            self._http.labels(handler, method, f"{status // 100}xx").inc()
            self._http_seconds.labels(handler, method).observe(seconds)

    def unknown_field(self, name: str) -> bool:
        """Counts an ignored field; true the first time that this name is seen. Odd names count as "other"."""
        room = len(self._unknown_seen) < MAX_UNKNOWN_FIELDS and FIELD_NAME.fullmatch(name) is not None
        first = room and name not in self._unknown_seen
        if first:
            self._unknown_seen.add(name)
        self._unknown.labels(name if name in self._unknown_seen else "other").inc()
        return first

    def finished(self, reason: str) -> None:
        self._finished.labels(self._model, "0", reason).inc()

    async def observed(
        self, stream: AsyncGenerator[list[ChoiceDelta], None], prompt_tokens: int, params: SamplingParams,
        timing: Timing,
    ) -> AsyncGenerator[list[ChoiceDelta], None]:  # fmt: skip
        """The same deltas, with what they tell about time and length noted on the way."""
        request = _Observation(self, prompt_tokens, params, timing)
        try:
            async with aclosing(stream):
                async for deltas in stream:
                    request.take(deltas)
                    yield deltas
        except Exception:
            request.end("error")
            raise
        finally:
            request.end("abort")


class _Observation:
    """Times and counts of one prompt's choices. Seconds since the epoch, as the engine's own."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, params: SamplingParams, timing: Timing) -> None:
        self.metrics, self.prompt_tokens, self.params, self.timing = metrics, prompt_tokens, params, timing
        self.arrival = time.time()
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.counts: dict[int, int] = {}
        self.open = set(range(params.n))

    def take(self, deltas: list[ChoiceDelta]) -> None:
        now = time.time()
        for delta in deltas:
            index = delta.index
            if delta.token_ids:
                if index in self.last:
                    self.metrics.inter_token.observe(now - self.last[index])
                else:
                    self.first[index] = now
                    self.metrics.first_token.observe(now - self.arrival)
                self.last[index] = now
                self.counts[index] = self.counts.get(index, 0) + len(delta.token_ids)
            if delta.finish_reason is not None:
                self._finish(index, delta.finish_reason, now)

    def end(self, reason: str) -> None:
        """Counts choices that got no end of their own."""
        for index in list(self.open):
            self._finish(index, reason, time.time())

    def _finish(self, index: int, reason: str, now: float) -> None:
        metrics, count = self.metrics, self.counts.get(index, 0)
        self.open.discard(index)
        metrics.finished(reason)
        metrics.e2e.observe(now - self.arrival)
        metrics.prompt_tokens.observe(self.prompt_tokens)
        metrics.generation_tokens.observe(count)
        if self.params.max_tokens is not None:
            metrics.params_max_tokens.observe(self.params.max_tokens)
        if count > 0:
            self._finish_times(index, count)
        if not self.open:
            metrics.params_n.observe(self.params.n)
            metrics.max_generation_tokens.observe(max(self.counts.values(), default=0))

    def _finish_times(self, index: int, count: int) -> None:
        metrics, first, last = self.metrics, self.first[index], self.last[index]
        metrics.decode.observe(last - first)
        if count > 1:
            metrics.per_output_token.observe((last - first) / (count - 1))
        timing = self.timing()
        if timing is not None:
            queued, scheduled = timing
            metrics.queue.observe(max(0.0, scheduled - queued))
            metrics.prefill.observe(max(0.0, first - scheduled))
            metrics.inference.observe(max(0.0, last - scheduled))
