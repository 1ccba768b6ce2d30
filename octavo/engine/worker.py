"""One rank of the engine: its share of the model on its device. `python -m octavo.engine.worker` is a rank above 0.

Such a rank reads from its standard input: settings, `Prepare`, then the plan of every step. It computes the same steps
as rank 0 and says nothing; it ends when its input does.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from octavo.backends.base import Device, open_device
from octavo.backends.kv import KV_FORMATS, KVFormat, group_layers
from octavo.backends.sim.device import SimDevice
from octavo.config import DTYPES, EngineConfig
from octavo.dist.group import SINGLE, Group
from octavo.engine.adapters import AdapterFacts
from octavo.engine.block_store import BlockStore
from octavo.engine.fingerprint import fingerprint, numerics, weights_digest
from octavo.engine.grammar import Compiler
from octavo.engine.pages import KVLayout
from octavo.engine.plan import AdapterChange, SequenceFault, StepPlan, StepResult
from octavo.engine.process import log_to_stderr, read_frame, read_settings
from octavo.engine.runner import Runner
from octavo.engine.sizing import kv_budget, size_kv
from octavo.errors import OctavoError, UsageError
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.models.decoder import Decoder
from octavo.models.loader import load_model
from octavo.models.lora import open_adapter
from octavo.models.lora_loader import AdapterLoader
from octavo.models.simulated import SimulatedDecoder
from octavo.models.spec import DecoderSpec, check_divisible
from octavo.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
Progress = Callable[[str, int, int], None]


class Prepare(msgspec.Struct, array_like=True):
    """What rank 0 decided once every rank had its weights."""

    page_size: int
    num_blocks: tuple[int, ...]
    max_model_len: int
    host_slots: tuple[int, ...] = ()


class Worker:
    """Load (`__init__`), `prepare`, then `run` plans. Raises typed errors when the model cannot be loaded.

    What can be refused without reading weights, which may take minutes, is refused before.
    """

    def __init__(self, config: EngineConfig, rank: int, directory: str, progress: Progress | None = None) -> None:
        self.config, self.rank = config, rank
        self.device, self.dtype = choose_device(config, rank)
        self.quantized = choose_kv_format(config.kv_cache_dtype, self.device, self.dtype)
        self.compiler = _compiler(config) if rank == 0 else None
        checkpoint = open_checkpoint(Path(config.path), weights=not isinstance(self.device, SimDevice))
        self._digest: Future[str] | None = None
        draft = self._open_draft()
        if rank == 0:
            _check_kv(config, checkpoint.spec, draft.spec if draft else None, self.device, self.dtype, self.quantized)
            self._digest = in_thread(lambda: weights_digest(checkpoint))
        self.group = _join(rank, config.tensor_parallel_size, self.device, directory)
        self.model: Decoder | SimulatedDecoder
        self._adapters: AdapterLoader | None = None
        if isinstance(self.device, SimDevice):
            if config.enable_lora:
                raise UsageError("--enable-lora: the device sim computes no adapters", fix="leave it out")
            self.model = SimulatedDecoder(checkpoint, self.device, self.dtype, self.group.size, self.quantized)
        else:
            self.model = load_model(checkpoint, self.device, self.dtype, self.group, progress, config.max_model_len)
            if config.enable_lora:
                self._adapters = AdapterLoader(self.model, checkpoint.parameters, self.device, self.dtype, self.group)
        self.draft_model: Decoder | None = None
        """all of it on rank 0, which alone makes guesses"""
        if draft is not None:
            self.draft_model = load_model(draft, self.device, self.dtype, SINGLE, progress, config.max_model_len)

    def _open_draft(self) -> Checkpoint | None:
        speculation = self.config.speculative_config
        if speculation is None or speculation.model is None or self.rank != 0:
            return None
        if isinstance(self.device, SimDevice):
            raise UsageError(
                "--speculative-config: a draft model on the device sim", limit="method ngram, as sim computes nothing",
                fix="use another method or device", param="speculative_config",
            )  # fmt: skip
        return open_checkpoint(Path(speculation.model))

    def fingerprint(self, page_size: int) -> str:
        """Of rank 0; waits until the weights' files are read."""
        assert self._digest is not None, "only rank 0 has one"
        kv_cache_dtype = self.quantized.name if self.quantized else str(self.dtype)
        facts = numerics(self._digest.result(), self.device, self.dtype, kv_cache_dtype, page_size, self.group.size)
        return fingerprint(facts)

    def least(self, value: int) -> int:
        """The least of all ranks' values; every rank must call it."""
        mine = self.device.upload(torch.tensor([value]))
        return int(self.group.all_gather(mine).min())

    def prepare(self, settings: Prepare) -> None:
        """Allocates the KV cache."""
        self.layout = KVLayout(settings.page_size, tuple(g.spec for g in self.model.kv_groups), settings.num_blocks)
        self._runner = Runner(
            self.model, self.device, self.layout, self.dtype, max_num_seqs=self.config.max_num_seqs,
            max_model_len=settings.max_model_len, vocab_size=self.config.vocab_size, rank=self.rank,
            eos_token_ids=self.config.eos_token_ids, quantized=self.quantized,
            speculation=self.config.speculative_config, draft_model=self.draft_model, compiler=self.compiler,
            host_slots=settings.host_slots,
        )  # fmt: skip

    def run(self, plan: StepPlan) -> StepResult:
        return self._runner.run(plan)

    @property
    def store(self) -> BlockStore:
        return self._runner.store

    def load_adapter(self, number: int, path: str) -> AdapterFacts:
        """Every rank must call it; it is loaded when all have read the same content.

        Raises what was wrong on this rank, or OctavoError when it was another.
        """
        assert self._adapters is not None, "adapters are not enabled"
        error: Exception | None = None
        digest = b""
        try:
            adapter = open_adapter(path, self._adapters.parameters, self.config.max_lora_rank)
            self._adapters.load(number, adapter)
            digest = adapter.digest
        except Exception as err:
            error = err
        if not self._all_have(digest):
            self._adapters.unload(number)
            raise error or OctavoError(f"another rank could not load the adapter at {path}", fix="see the log")
        return AdapterFacts(adapter.rank, digest)

    def _all_have(self, digest: bytes) -> bool:
        """Whether all ranks have this digest, and not the empty one."""
        mine = self.device.upload(torch.tensor([int.from_bytes(digest[:7], "little")]))
        same = bool((self.group.all_gather(mine) == mine).all())
        return same and digest != b""

    def unload_adapter(self, number: int) -> None:
        assert self._adapters is not None, "adapters are not enabled"
        self._adapters.unload(number)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Runs beside the loading of weights; a daemon, so that an engine that fails to start need not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as err:
            future.set_exception(err)

    threading.Thread(target=run, daemon=True).start()
    return future


def _compiler(config: EngineConfig) -> Compiler | None:
    if config.tokenizer is None:
        return None
    source = Path(config.tokenizer)
    return Compiler(lambda: load_tokenizer(source), config.vocab_size, config.eos_token_ids)


def _check_kv(
    config: EngineConfig, spec: DecoderSpec, draft: DecoderSpec | None, device: Device, dtype: torch.dtype,
    quantized: KVFormat | None,
) -> None:  # fmt: skip
    """Raises what `size_kv` will raise once the weights have taken their memory, where that is certain by now."""
    ranks = config.tensor_parallel_size
    check_divisible(spec, ranks)
    groups = group_layers(spec.kv_specs(spec.num_kv_heads // ranks))
    draft_groups = group_layers(draft.kv_specs()) if draft else ()
    size_kv(config, device, groups, dtype, *kv_budget(config, device, ranks), quantized, draft_groups)


def choose_device(config: EngineConfig, rank: int) -> tuple[Device, torch.dtype]:
    """The device, opened, and the dtype to compute in. Raises UsageError for a dtype that the device lacks."""
    name, size = config.device, config.tensor_parallel_size
    if config.dtype == "float32" and name in ("auto", "cpu"):
        name = "reference"  # the kernels compute in bfloat16
    threads = config.threads
    if size > 1:
        threads = max(1, (threads or len(os.sched_getaffinity(0))) // size)
    device = open_device(name, rank, threads)
    if config.dtype == "auto":
        plain = device.torch_device.type == "cpu" and getattr(device, "kernels", "reference") == "reference"
        return device, torch.float32 if plain else device.dtypes[0]
    dtype: torch.dtype = getattr(torch, config.dtype)
    if dtype in device.dtypes:
        return device, dtype
    if dtype is torch.float16 and torch.bfloat16 in device.dtypes:
        log.warning("--dtype float16: the device %s computes in bfloat16 instead", device.name)
        return device, torch.bfloat16
    known = ", ".join(str(d).removeprefix("torch.") for d in device.dtypes)
    raise UsageError(f"--dtype {config.dtype} is not for the device {device.name}", limit=known, param="dtype")


def choose_kv_format(name: str, device: Device, dtype: torch.dtype) -> KVFormat | None:
    """How the KV cache keeps its numbers; None: as the model computes them. Raises UsageError."""
    computed = str(dtype).removeprefix("torch.")
    if DTYPES.get(name) in ("auto", computed):
        return None
    if name in KV_FORMATS:
        return KV_FORMATS[name]
    raise UsageError(
        f"--kv-cache-dtype {name[:80]} cannot be used on the device {device.name}, which computes in {computed}",
        limit=", ".join(("auto", computed, *KV_FORMATS)), fix="choose one of them", param="kv_cache_dtype",
    )  # fmt: skip


def _join(rank: int, size: int, device: Device, directory: str) -> Group:
    if size == 1:
        return SINGLE
    if device.dist_backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Group.join(rank, size, device.dist_backend, f"file://{directory}/rendezvous")


def main() -> None:
    """The life of a rank above 0."""
    settings = read_settings()
    log_to_stderr(settings["log_prefix"])
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_frames, args=(frames,), daemon=True).start()
    try:
        worker = Worker(EngineConfig.from_dict(settings["config"]), settings["rank"], settings["directory"])
        worker.least(worker.device.memory()[1])
        worker.prepare(msgspec.msgpack.decode(frames.get(), type=Prepare))
        decode = msgspec.msgpack.Decoder(StepPlan | AdapterChange).decode
        while True:
            _follow(worker, decode(frames.get()))
    except Exception as err:
        log.error("%s", err, exc_info=None if isinstance(err, OctavoError) else err)
        os._exit(1)


def _follow(worker: Worker, message: StepPlan | AdapterChange) -> None:
    if isinstance(message, StepPlan):
        with suppress(SequenceFault):  # rank 0 meets the same one, and reports it
            worker.run(message)
    elif message.path is None:
        worker.unload_adapter(message.number)
    else:
        try:
            worker.load_adapter(message.number, message.path)
        except Exception as err:  # rank 0 knows that some rank failed, and reports it
            log.warning("adapter %s: %s", message.path, err)


def _read_frames(frames: queue.SimpleQueue[bytes]) -> None:
    """Ends the process as soon as rank 0 is gone, even in the middle of a step."""
    while (frame := read_frame()) is not None:
        frames.put(frame)
    os._exit(0)


if __name__ == "__main__":
    main()
