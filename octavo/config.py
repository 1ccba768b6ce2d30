"""Settings of one engine. `EngineArgs` is what a user may say; `EngineConfig` is what was decided, once.

`resolve(args, facts)` is the only place where defaults that depend on model or device are chosen. Both are frozen.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.errors import UsageError

DTYPES = {
    "auto": "auto", "float32": "float32", "float": "float32", "float16": "float16", "half": "float16",
    "bfloat16": "bfloat16",
}  # fmt: skip
GIB = 1 << 30
MAX_PORT = 65535


@dataclass(frozen=True)
class EngineArgs:
    """What the user asked for; `None` means "choose for me". Names are those of vLLM's flags where vLLM has them."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    tokenizer: str | None = None
    served_model_name: tuple[str, ...] = ()
    max_model_len: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    threads: int | None = None
    seed: int = 0
    """of requests that bring none: 0 draws theirs from the system, another number makes a fixed series of them"""
    max_logprobs: int = 20
    chat_template: str | None = None
    generation_config: str = "auto"
    download_dir: str | None = None
    engine_restarts: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """What `resolve` needs to know of the model on disk."""

    path: str
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine process needs; travels to it as JSON (`to_dict`, `from_dict`)."""

    model: str
    path: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int | None
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int
    threads: int | None
    seed: int
    max_model_len_asked: bool = False
    """the user named `max_model_len`: a KV cache too small for it is then an error, not a shorter context"""
    max_unacked_messages: int = 256
    """Output messages an API process may leave unacknowledged before its requests are no longer scheduled."""
    warnings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> EngineConfig:
        tuples = {k: tuple(fields[k]) for k in ("eos_token_ids", "warnings")}
        return EngineConfig(**{**fields, **tuples})


def resolve(args: EngineArgs, facts: ModelFacts) -> EngineConfig:
    """Checks every setting against its limits and fills in the defaults.

    Raises UsageError naming flag, value, limit and fix.
    """
    if args.dtype not in DTYPES:
        raise UsageError(f"--dtype {args.dtype} is unknown", fix=f"one of {', '.join(DTYPES)}", param="dtype")
    max_model_len = facts.context_len if args.max_model_len is None else args.max_model_len
    if max_model_len > facts.context_len:
        raise UsageError(
            f"--max-model-len {max_model_len} is longer than the model's context",
            limit=f"{facts.context_len} tokens", fix="lower --max-model-len or leave it out", param="max_model_len",
        )  # fmt: skip
    max_num_seqs = args.max_num_seqs or 256
    _at_least(
        1, max_model_len=max_model_len, max_num_seqs=args.max_num_seqs, block_size=args.block_size,
        threads=args.threads, max_num_batched_tokens=args.max_num_batched_tokens,
        tensor_parallel_size=args.tensor_parallel_size, num_gpu_blocks_override=args.num_gpu_blocks_override,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
    )  # fmt: skip
    utilization = args.gpu_memory_utilization
    if utilization is not None and not 0 < utilization <= 1:
        raise UsageError(
            f"--gpu-memory-utilization {utilization} is out of range", limit="above 0, at most 1",
            fix="give a fraction such as 0.9", param="gpu_memory_utilization",
        )  # fmt: skip
    _at_least(0, max_logprobs=args.max_logprobs, engine_restarts=args.engine_restarts)
    if not -(1 << 63) <= args.seed < 1 << 63:
        raise UsageError(f"--seed {args.seed} is out of range", limit="64 bits with a sign", fix="correct --seed")
    budget = args.max_num_batched_tokens or 2048
    if budget < max_num_seqs:
        if args.max_num_seqs is not None:
            raise UsageError(
                f"--max-num-batched-tokens {budget} is below --max-num-seqs {max_num_seqs}",
                limit="every running sequence needs one token a step", fix="raise the first or lower the second",
                param="max_num_batched_tokens",
            )  # fmt: skip
        max_num_seqs = budget
    return EngineConfig(
        model=args.model, path=facts.path, device=args.device, dtype=DTYPES[args.dtype],
        max_model_len=max_model_len, vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids,
        block_size=args.block_size, gpu_memory_utilization=utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes, num_gpu_blocks_override=args.num_gpu_blocks_override,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, tensor_parallel_size=args.tensor_parallel_size,
        threads=args.threads, seed=args.seed, max_model_len_asked=args.max_model_len is not None,
    )  # fmt: skip


def _at_least(least: int, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value >= least:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value} is too small", limit=f"at least {least}", fix=f"raise {flag}", param=name)


@dataclass(frozen=True)
class ServerArgs:
    """How the HTTP server listens and behaves; nothing here reaches the engine."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    """a larger request body is answered 413"""
    max_buffered_events: int = 4096
    """token events held for a client that reads too slowly, before its request is aborted"""
    shutdown_timeout_s: float = 30.0
    """after SIGTERM, how long running requests may take to finish"""
    log_requests: bool = False
    access_log: bool = False
    log_level: str = "info"

    def verify(self) -> None:
        """Raises UsageError naming flag, value, limit and fix."""
        if not 0 <= self.port <= MAX_PORT:
            raise UsageError(
                f"--port {self.port} is out of range", limit=f"0 to {MAX_PORT}",
                fix="choose one within it (0: any that is free)", param="port",
            )  # fmt: skip
        _at_least(1, max_body_bytes=self.max_body_bytes, max_buffered_events=self.max_buffered_events)
        _at_least(0, shutdown_timeout=self.shutdown_timeout_s)
