"""Runs plans on all ranks: rank 0 here, the others as programs of their own that get the same plans."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine.adapters import AdapterFacts
from octavo.engine.block_store import BlockStore
from octavo.engine.messages import EngineFacts
from octavo.engine.pages import KVLayout
from octavo.engine.plan import AdapterChange, StepPlan, StepResult
from octavo.engine.process import Child, remove_directory
from octavo.engine.sizing import Sizing, kv_budget, size_kv
from octavo.engine.types import StructuredOutputsParams
from octavo.engine.worker import Prepare, Progress, Worker
from octavo.errors import EngineDead, OctavoError, UsageError

log = logging.getLogger(__name__)

WORKER_PROGRAM = (sys.executable, "-m", "octavo.engine.worker")
GRACE_S = 2.0
"""While starting, an error that stops one rank mostly stops all: rank 0 then has this long to name it better."""
encode = msgspec.msgpack.Encoder().encode


class RankExecutor:
    """Implements `core.Executor`. A rank that dies ends the engine."""

    facts: EngineFacts
    layout: KVLayout

    def __init__(self, config: EngineConfig, directory: str, progress: Progress) -> None:
        self._directory = directory
        self._started = self._closing = False
        self._lost = threading.Event()
        self._others = [self._start_rank(rank, config) for rank in range(1, config.tensor_parallel_size)]
        try:
            self._load(config, progress)
        except OctavoError:
            self._closing = True
            raise
        except Exception as err:
            if self._others and self._lost.wait(GRACE_S):
                raise EngineDead("a rank died while starting, see above") from err
            self._closing = True
            raise
        self._started = True

    def _load(self, config: EngineConfig, progress: Progress) -> None:
        begin = time.monotonic()
        self.worker = worker = Worker(config, 0, self._directory, progress)
        budget, reason = kv_budget(config, worker.device, config.tensor_parallel_size)
        budget = min(budget, worker.least(worker.device.memory()[1]))
        draft = worker.draft_model.kv_groups if worker.draft_model else ()
        groups = worker.model.kv_groups
        sizing = size_kv(config, worker.device, groups, worker.dtype, budget, reason, worker.quantized, draft)
        if sizing.warning:
            log.warning("%s", sizing.warning)
        self.layout = sizing.layout
        prepare = Prepare(sizing.layout.page_size, sizing.layout.num_blocks, sizing.max_model_len, sizing.host_slots)
        self._tell(prepare)
        worker.prepare(prepare)
        self.facts = self._facts(config, sizing, time.monotonic() - begin)

    def _facts(self, config: EngineConfig, sizing: Sizing, seconds: float) -> EngineFacts:
        worker, speculation = self.worker, config.speculative_config
        dtype = str(worker.dtype).removeprefix("torch.")
        draft_bytes = worker.draft_model.weights_bytes if worker.draft_model else 0
        return EngineFacts(
            pid=os.getpid(), device=worker.device.name, dtype=dtype,
            kv_cache_dtype=worker.quantized.name if worker.quantized else dtype,
            kernels=getattr(worker.device, "kernels", "reference"), num_blocks=sum(sizing.layout.num_blocks),
            block_size=sizing.layout.page_size, max_model_len=sizing.max_model_len,
            weights_bytes=worker.model.weights_bytes + draft_bytes, kv_cache_bytes=sizing.kv_cache_bytes,
            load_seconds=seconds, prefix_caching=config.enable_prefix_caching,
            num_speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
            asynchronous=worker.device.asynchronous, fingerprint=worker.fingerprint(sizing.layout.page_size),
        )  # fmt: skip

    def run(self, plan: StepPlan) -> StepResult:
        begin = time.monotonic()
        self._tell(plan)
        result = self.worker.run(plan)
        seconds = time.monotonic() - begin
        return msgspec.structs.replace(result, seconds=seconds, move_seconds=self.worker.store.seconds)

    @property
    def host_memory(self) -> BlockStore | None:
        """Rank 0's slots for blocks, or None without a host tier."""
        return self.worker.store if any(self.worker.store.num_slots) else None

    def compile(self, asked: StructuredOutputsParams) -> Future[Any]:
        if self.worker.compiler is None:
            raise UsageError("this engine has no tokenizer, which structured output needs", fix="start it with one")
        return self.worker.compiler.begin(asked)

    def load_adapter(self, number: int, path: str) -> AdapterFacts:
        """On all ranks or none. Raises ModelNotFound, BadModelFile or NotEnoughMemory."""
        self._tell(AdapterChange(number, path))
        return self.worker.load_adapter(number, path)

    def unload_adapter(self, number: int) -> None:
        self._tell(AdapterChange(number, None))
        self.worker.unload_adapter(number)

    def shutdown(self) -> None:
        self._closing = True
        for child in self._others:
            child.close()
        for child in self._others:
            child.wait(GRACE_S)

    def _tell(self, message: Prepare | StepPlan | AdapterChange) -> None:
        if self._others:
            content = encode(message)
            for child in self._others:
                child.send(content)

    def _start_rank(self, rank: int, config: EngineConfig) -> Child:
        def exited(status: str, last_line: str) -> None:
            if not self._closing and not self._started:
                time.sleep(GRACE_S)
            self._lost.set()
            if not self._closing:
                log.error("rank %d ended (%s), and the engine with it; its last words: %s", rank, status, last_line)
                remove_directory(self._directory)
                os._exit(1)  # the main thread may wait for that rank for ever

        settings = {
            "config": config.to_dict(), "directory": self._directory, "rank": rank, "log_prefix": f"rank {rank}: "
        }  # fmt: skip
        return Child(WORKER_PROGRAM, settings, self._directory, exited)


def start_executor(config: EngineConfig, directory: str, progress: Progress) -> RankExecutor:
    return RankExecutor(config, directory, progress)
