"""The engine process: `python -m octavo.engine.core`, started by `engine.client`. No torch here; the executor has it.

It ends when its parent's pipe closes (at once), on `Shutdown`, and on SIGTERM: after the running requests, a second
SIGTERM at once. It ignores SIGINT, since Ctrl-C in a terminal is meant for the program that the user sees.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from octavo.clock import SYSTEM_CLOCK, Clock
from octavo.config import EngineConfig
from octavo.engine.adapters import AdapterHost, Adapters
from octavo.engine.block_folder import OVERHEAD_BYTES, BlockFolder, check_folder
from octavo.engine.disk_tier import DiskTier
from octavo.engine.intake import Name
from octavo.engine.links import Links
from octavo.engine.messages import (
    Abort,
    AddRequest,
    EngineFacts,
    LoadAdapter,
    Outputs,
    Ping,
    Shutdown,
    UnloadAdapter,
)  # fmt: skip
from octavo.engine.pages import KVLayout
from octavo.engine.plan import SequenceFault, StepPlan, StepResult, fill_in
from octavo.engine.process import end_with_parent, log_to_stderr, read_settings, remove_directory
from octavo.engine.roster import Events
from octavo.engine.scheduler import Scheduler
from octavo.engine.tiers import HostMemory
from octavo.engine.types import MAX_CHOICES, Request, StructuredOutputsParams, TokenEvent
from octavo.errors import EngineDead, OctavoError, Overloaded, UsageError, to_wire

log = logging.getLogger(__name__)

TICK_S = 0.1
"""how often deadlines are looked at, and the wait when all work is paused"""
LIFE_CHECK_S = 0.5
"""how often the clients' locks are tried"""
IDLE_CHECK_S = 10.0
"""least time between two checks of the scheduler's integrity, made when it falls idle"""
MAX_FAILED_STEPS = 3
DRAIN_S = 3.0
"""after the last request, how long blocks are written that wait for the disk"""


class Executor(AdapterHost, Protocol):
    """Loads the model and its adapters, and runs plans on all ranks."""

    facts: EngineFacts
    layout: KVLayout

    @property
    def host_memory(self) -> HostMemory | None:
        """Slots for KV blocks; None without a host tier."""

    def run(self, plan: StepPlan) -> StepResult:
        """Raises SequenceFault when one sequence is to blame, EngineDead when no step can ever run again."""

    def compile(self, asked: StructuredOutputsParams) -> Future[Any]:
        """Is done when a sequence that asks for this can run without waiting. Raises UsageError."""

    def shutdown(self) -> None: ...


StartExecutor = Callable[[EngineConfig, str, Callable[[str, int, int], None]], Executor]
"""(config, directory, progress(stage, done, total)); raises typed errors"""


class _Running(NamedTuple):
    plan: StepPlan
    result: Future[StepResult]


class Engine:
    """The loop: take in messages, step, send what happened.

    The overlapped loop runs a step in a thread of its own, and meanwhile commits and sends what the one before gave and
    plans the one after; the tokens are the same. With speculation the next plan must wait for what was accepted, so
    the loop is plain.
    """

    def __init__(
        self, config: EngineConfig, links: Links, executor: Executor, clock: Clock = SYSTEM_CLOCK,
        disk: DiskTier | None = None,
    ) -> None:  # fmt: skip
        self.links, self.executor, self.clock = links, executor, clock
        self.scheduler = Scheduler(
            executor.layout, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=executor.facts.max_model_len, vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids, seed=config.seed, policy=config.scheduling_policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_num_queued_reqs=config.max_num_queued_reqs, max_num_queued_tokens=config.max_num_queued_tokens,
            enable_prefix_caching=config.enable_prefix_caching, host=executor.host_memory, disk=disk,
        )  # fmt: skip
        if executor.host_memory is not None:
            self.scheduler.tiers.speed.host.note(*executor.host_memory.probe())
        wanted = executor.facts.asynchronous if config.async_scheduling is None else config.async_scheduling
        overlapped = wanted and config.speculative_config is None
        self._runner = ThreadPoolExecutor(1, "octavo-runner") if overlapped else None
        self._running: _Running | None = None
        self.adapters = Adapters(executor, config.enable_lora, config.max_loras)
        self.scheduler.adapters = self.adapters.loaded
        for name, path in config.lora_modules:
            self.adapters.load(name, path)
        self._events: Events = []
        self._to_answer: set[str] = set()
        self._compiling: dict[Name, Future[Any]] = {}
        self._draining = self._ended = False
        self._ran = False
        self._failed_steps = 0
        self._blame: OctavoError | None = None
        self._last_tick = self._last_life_check = self._last_idle_check = 0.0

    def run(self) -> None:
        """Returns after Shutdown or SIGTERM. Raises EngineDead when no step works any more."""
        signal.set_wakeup_fd(self.links.wake_fd)
        signal.signal(signal.SIGTERM, lambda *_: self._shut_down(drain=not self._draining))
        try:
            while not self._ended and (self.scheduler.has_work or not self._draining):
                self._take_in()
                self._look_around()
                self._step()
                self._free_adapters()
                self._send_events()
            self._let_step_end()
            self._running = None
            self._events += self.scheduler.end_all()
            self._send_events()
            self._keep_for_next_start()
        except EngineDead as dead:
            self._events += self.scheduler.end_all(dead)
            raise
        except Exception as err:
            self._events += self.scheduler.end_all(EngineDead(f"the engine broke: {err!r}"))
            raise
        finally:
            self._send_events()

    def _keep_for_next_start(self) -> None:
        """What the device remembers goes to the disk, if there is one."""
        plan = self.scheduler.last_plan()
        if plan.moves:
            self.scheduler.tiers.done(plan.moves, self.executor.run(plan).move_seconds)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        idle_wait = TICK_S if self.scheduler.has_work else None
        for client_id, message in self.links.receive(0 if self._ran or self._running else idle_wait):
            if isinstance(message, AddRequest):
                self._add(client_id, message.request)
            elif isinstance(message, Abort):
                self._events += self.scheduler.abort(client_id, message.request_id, message.choices)
            elif isinstance(message, Ping):
                self._to_answer.add(client_id)
            elif isinstance(message, LoadAdapter | UnloadAdapter):
                self._change_adapters(client_id, message)
            elif isinstance(message, Shutdown):
                self._shut_down(message.drain)
        self.scheduler.paused_clients = self.links.paused()
        self._compiling = {name: done for name, done in self._compiling.items() if not done.done()}
        self.scheduler.held_back = self._compiling.keys()

    def _add(self, client_id: str, request: Request) -> None:
        request.client_id = client_id
        try:
            if self._draining:
                raise Overloaded("the engine is shutting down", fix="ask again when it is back")
            if request.sampling.structured_outputs is not None:
                self._hold_back(request)
            self._events += self.scheduler.add(request, self.clock.time())
        except Exception as err:
            if not isinstance(err, OctavoError):
                log.exception("request %s could not be admitted", request.request_id)
                err = OctavoError(f"the request could not be admitted: {err!r}")
            for choice in range(min(request.sampling.n, MAX_CHOICES)):
                event = TokenEvent(request.request_id, choice, finish_reason="error", error=to_wire(err))
                self._events.append((client_id, event))

    def _hold_back(self, request: Request) -> None:
        """Lets the others run while its grammar is compiled."""
        assert request.sampling.structured_outputs is not None
        done = self.executor.compile(request.sampling.structured_outputs)
        if not done.done():
            self._compiling[(request.client_id, request.request_id)] = done
            done.add_done_callback(lambda _: self.links.wake())

    def _change_adapters(self, client_id: str, message: LoadAdapter | UnloadAdapter) -> None:
        """Between two steps: while an adapter's files are read, nothing is computed."""
        error = None
        try:
            if isinstance(message, LoadAdapter):
                self._let_step_end()
                self.adapters.load(message.name, message.path, message.in_place)
            else:
                self.adapters.unload(message.name)
        except EngineDead:
            raise
        except Exception as err:
            if not isinstance(err, OctavoError):
                log.exception("the adapter %s could not be changed", message.name)
                err = OctavoError(f"the adapter could not be changed: {err!r}")
            error = to_wire(err)
        self.links.tell_adapters(list(self.adapters.loaded.values()), client_id, message.call, error)

    def _free_adapters(self) -> None:
        """One whose last sequence has ended may still be in the step that runs."""
        if self.adapters.leaving and self.adapters.leaving - self.scheduler.adapters_in_use:
            self._let_step_end()
            self.adapters.sweep(self.scheduler.adapters_in_use)

    def _shut_down(self, drain: bool) -> None:
        self._draining = True
        self._ended = self._ended or not drain

    def _look_around(self) -> None:
        """What time brings: deadlines, and clients that are gone."""
        now = self.clock.monotonic()
        if now - self._last_tick >= TICK_S:
            self._last_tick = now
            self._events += self.scheduler.expire(self.clock.time())
        if now - self._last_life_check >= LIFE_CHECK_S:
            self._last_life_check = now
            for client_id in self.links.departed():
                self.scheduler.drop_client(client_id)

    def _send_events(self) -> None:
        """One message to each client that has events or has pinged."""
        by_client: dict[str, list[TokenEvent]] = defaultdict(list, {client_id: [] for client_id in self._to_answer})
        for client_id, event in self._events:
            by_client[client_id].append(event)
        timings = self.scheduler.take_timings()
        for client_id, events in by_client.items():
            if client_id in self.links.links:
                sequence = self.links.next_sequence(client_id)
                mine = {name: list(times) for (owner, name), times in timings.items() if owner == client_id}
                self.links.send(client_id, Outputs(sequence, events, self.scheduler.snapshot(), mine))
        self._events = []
        self._to_answer.clear()

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._runner is None:
            self._step_plain()
        else:
            self._step_overlapped(self._runner)

    def _step_plain(self) -> None:
        plan = self.scheduler.plan(self.clock.time())
        if not plan.chunks:
            self._fall_idle()
            return
        self._ran = True
        try:
            result = self.executor.run(plan)
        except EngineDead:
            raise
        except Exception as err:
            self._step_failed(plan, err)
        else:
            self._step_done(plan, result)

    def _step_overlapped(self, runner: ThreadPoolExecutor) -> None:
        """Plans the next step while one runs, and starts it as soon as that one's tokens are known."""
        plan, before = self.scheduler.plan(self.clock.time()), self._running
        if before is None:
            if plan.chunks:
                self._start(runner, plan)
            else:
                self._fall_idle()
            return
        self._running = None
        try:
            result = before.result.result()
        except EngineDead:
            raise
        except Exception as err:
            self._step_failed(before.plan, err)
            return
        if plan.chunks:
            fill_in(plan, before.plan, result)
            self._start(runner, plan)
        self._step_done(before.plan, result)

    def _start(self, runner: ThreadPoolExecutor, plan: StepPlan) -> None:
        self._ran = True
        self._running = _Running(plan, runner.submit(self.executor.run, plan))

    def _let_step_end(self) -> None:
        """Waits for the step that runs, if one does; what came of it is still to be taken in."""
        if self._running is not None:
            self._running.result.exception()

    def _step_done(self, plan: StepPlan, result: StepResult) -> None:
        self._events += self.scheduler.commit(plan, result)
        self._failed_steps = 0
        if self._blame is not None:
            self._events += self.scheduler.end_suspect(self._blame)
            self._blame = None

    def _step_failed(self, plan: StepPlan, err: Exception) -> None:
        """Ends the sequence at fault; where none is known, tries again without the newest request, which then is to
        blame, and ends all of the step's when that fails, too."""
        log.error("a step failed", exc_info=err)
        fault = err.sequence_id if isinstance(err, SequenceFault) else None
        cause = err.__cause__ if isinstance(err, SequenceFault) and err.__cause__ else err
        error = cause if isinstance(cause, OctavoError) else OctavoError(f"a step of the engine failed: {cause!r}")
        if fault is None and self.scheduler.set_aside_newest(plan):
            self._blame = error
            return
        self._events += self.scheduler.fail(plan, error, fault)
        self._failed_steps += fault is None
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineDead(f"{self._failed_steps} steps in a row failed, the last with {cause!r}") from err

    def _fall_idle(self) -> None:
        now = self.clock.monotonic()
        if self._ran and now - self._last_idle_check >= IDLE_CHECK_S:
            self._last_idle_check = now
            self.scheduler.check_integrity()
        self._ran = False


def open_disk(config: EngineConfig, executor: Executor, links: Links) -> DiskTier | None:
    """Raises UsageError for a folder that cannot be used, or that may not hold even one block of each KV group."""
    if config.kv_offloading_dir is None or executor.host_memory is None:
        return None
    block_bytes = executor.host_memory.block_bytes
    least = sum(block_bytes) + OVERHEAD_BYTES * len(block_bytes)
    if config.kv_offloading_dir_bytes < least:
        raise UsageError(
            f"--kv-offloading-dir-size is {config.kv_offloading_dir_bytes} bytes, in which not one KV block of each "
            "kind fits", limit=f"at least {least} bytes", fix="raise it", param="kv_offloading_dir_size",
        )  # fmt: skip
    # A draft model's keys and values stand in the same blocks.
    numerics = f"{executor.facts.fingerprint} {config.speculative_config}"
    folder = BlockFolder(config.kv_offloading_dir, config.kv_offloading_dir_bytes, numerics)
    return DiskTier(folder, links.wake)


def run_engine(start_executor: StartExecutor) -> int:
    """The whole life of an engine process; returns its exit status."""
    settings = read_settings()
    log_to_stderr(settings["log_prefix"])
    directory = settings["directory"]
    end_with_parent(lambda: remove_directory(directory))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = EngineConfig.from_dict(settings["config"])
    links = Links(directory, config.max_unacked_messages)
    executor: Executor | None = None
    engine: Engine | None = None
    disk: DiskTier | None = None
    try:
        if config.kv_offloading_dir is not None:
            check_folder(config.kv_offloading_dir)  # the model may take minutes to load
        executor = start_executor(config, directory, links.progress)
        disk = open_disk(config, executor, links)
        engine = Engine(config, links, executor, disk=disk)
        links.ready(executor.facts, list(engine.adapters.loaded.values()))
        gc.collect()
        gc.freeze()  # what starting made stays for good, and collecting the rest then takes no time
        engine.run()
        return 0
    except Exception as err:
        kind = OctavoError if engine is None else EngineDead
        error = err if isinstance(err, kind) else kind(f"the engine broke: {err!r}")
        if error is not err:
            log.error("the engine broke", exc_info=err)
        if not links.fail(error):
            log.error("%s", error)
        return error.exit_code
    finally:
        if disk is not None:
            disk.close(DRAIN_S)
        if executor is not None:
            executor.shutdown()
        links.close()
        remove_directory(directory)


def main(start_executor: StartExecutor) -> None:
    try:
        status = run_engine(start_executor)
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        status = exit_.code if isinstance(exit_.code, int) else 2
    logging.shutdown()
    os._exit(status)  # nothing of value is left, and the destructors of device libraries may hang


def start_on_device(config: EngineConfig, directory: str, progress: Callable[[str, int, int], None]) -> Executor:
    """Imports torch only here, where a client can be told that it is missing or broken."""
    try:
        from octavo.engine.executor import start_executor
    except (ImportError, OSError) as err:
        raise UsageError(f"the engine's libraries cannot be loaded: {err}", fix="install torch anew") from None
    return start_executor(config, directory, progress)


if __name__ == "__main__":
    main(start_on_device)
