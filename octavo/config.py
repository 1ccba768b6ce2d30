"""Settings of one engine. `EngineArgs` is what a user may say; `EngineConfig` is what was decided, once.

`resolve(args, facts)` is the only place where defaults that depend on model or device are chosen. Both are frozen.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_type_hints

import msgspec

from octavo.errors import UsageError

DTYPES = {
    "auto": "auto", "float32": "float32", "float": "float32", "float16": "float16", "half": "float16",
    "bfloat16": "bfloat16",
}  # fmt: skip
POLICIES = ("fcfs", "priority")
GIB = 1 << 30
MAX_PORT = 65535
_MAX_COUNT = (1 << 31) - 1


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be: whole ones, or any for `kind` float; `least` itself not if `above`."""

    least: int
    most: int
    kind: type = int
    above: bool = False

    def __str__(self) -> str:
        return f"above {self.least}, at most {self.most}" if self.above else f"{self.least} to {self.most}"

    def holds(self, value: object) -> bool:
        """False too for what is no such number, such as NaN or a bool."""
        if isinstance(value, bool) or not isinstance(value, (int, self.kind)):
            return False
        number: Any = value
        return bool(self.least <= number <= self.most and not (self.above and number == self.least))


def _number(default: float | None, least: int, most: int, kind: type = int, above: bool = False) -> Any:
    """A field with its default and range; one whose default is None may be None."""
    return field(default=default, metadata={"range": Range(least, most, kind, above)})


def _verify(settings: EngineArgs | ServerArgs) -> None:
    """Every number within its range, all else of its type, no text empty or with what cannot be sent or shown.

    Raises UsageError naming flag, value, limit and fix.
    """
    kinds = get_type_hints(type(settings))
    for setting in fields(settings):
        name, value = setting.name, getattr(settings, setting.name)
        flag = "--" + name.removesuffix("_s").replace("api_keys", "api_key").replace("_", "-")
        limits: Range | None = setting.metadata.get("range")
        unset = value is None and setting.default is None
        if limits is not None and not unset and not limits.holds(value):
            raise UsageError(
                f"{flag} {_short(value)} is out of range",
                limit=str(limits),
                fix="choose a number within it",
                param=name,
            )
        if limits is None:
            _check_kind(flag, name, value, kinds[name])
        several = isinstance(value, tuple)
        for text in value if several else (value,):
            if text == "":
                raise UsageError(f"{flag} is empty", fix="give a value or leave it out", param=name)
            if several and not (isinstance(text, str) and text.isprintable() and text == text.strip()):
                shown = "with this value" if name == "api_keys" else _short(text)
                limit = "characters that can be shown, no spaces around them"
                raise UsageError(f"{flag} {shown} cannot be used", limit=limit, fix="correct it", param=name)


def _check_kind(flag: str, name: str, value: object, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as err:
        shown = "with this value" if name == "api_keys" else _short(value)
        raise UsageError(f"{flag} {shown} cannot be used", limit=str(err), fix="correct it", param=name) from None


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


@dataclass(frozen=True)
class EngineArgs:
    """What the user asked for; `None` means "choose for me". Names are those of vLLM's flags where vLLM has them."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    tokenizer: str | None = None
    served_model_name: tuple[str, ...] = ()
    max_model_len: int | None = _number(None, 1, _MAX_COUNT)
    block_size: int | None = _number(None, 1, 1 << 16)
    gpu_memory_utilization: float | None = _number(None, 0, 1, float, above=True)
    kv_cache_memory_bytes: int | None = _number(None, 1, 1 << 50)
    num_gpu_blocks_override: int | None = _number(None, 1, _MAX_COUNT)
    max_num_seqs: int | None = _number(None, 1, 1 << 20)
    max_num_batched_tokens: int | None = _number(None, 1, 1 << 24)
    tensor_parallel_size: int = _number(1, 1, 64)
    threads: int | None = _number(None, 1, 1024)
    scheduling_policy: str = "fcfs"
    """fcfs, or priority: a request with a lower `priority` goes first, and may take the place of a running one"""
    long_prefill_token_threshold: int = _number(0, 0, 1 << 24)
    """most prompt tokens that one sequence computes in a step while others wait or run; 0: no limit"""
    max_num_queued_reqs: int | None = _number(None, 1, _MAX_COUNT)
    max_num_queued_tokens: int | None = _number(None, 1, 1 << 40)
    async_scheduling: bool | None = None
    """the next step is planned while this one runs; None: where the device works by itself"""
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kv_offloading_size: float = _number(0, 0, 1 << 20, float)
    """GiB of host memory, of all ranks together, for blocks that leave the device; 0: none"""
    kv_offloading_dir: str | None = None
    """where blocks that leave host memory are kept, across restarts; None: nowhere"""
    kv_offloading_dir_size: float = _number(16, 0, 1 << 20, float, above=True)
    """GiB that `kv_offloading_dir` may hold"""
    speculative_config: str | dict[str, Any] | None = None
    """vLLM's keys, or JSON of them; see `Speculation`"""
    enable_lora: bool = False
    lora_modules: tuple[str, ...] = ()
    """adapters to load at start: NAME=PATH, or vLLM's JSON with name and path"""
    max_loras: int = _number(8, 1, 1024)
    """adapters that are loaded at once"""
    max_lora_rank: int = _number(64, 1, 512)
    seed: int = _number(0, -(1 << 63), (1 << 63) - 1)
    """of requests that bring none: 0 draws theirs from the system, another number makes a fixed series of them"""
    max_logprobs: int = _number(20, -1, 1 << 20)
    """that a request may ask for at each token; -1: as many as the vocabulary has"""
    chat_template: str | None = None
    generation_config: str = "auto"
    download_dir: str | None = None
    engine_restarts: int = _number(0, 0, 1000)

    def verify(self) -> None:
        _verify(self)
        parse_speculation(self.speculative_config)


@dataclass(frozen=True)
class Speculation:
    """How tokens are guessed ahead of the model. Names and meaning are those of vLLM's `speculative_config`.

    Guesses change no answer: a guess is taken only where it is the token that the model itself gives.
    """

    method: str
    num_speculative_tokens: int = _number(None, 1, 32)
    """most guesses at a time; a sequence whose guesses fail gets fewer"""
    prompt_lookup_min: int = _number(5, 1, 64)
    """ngram: a place earlier in the text counts if its last so many tokens are the same"""
    prompt_lookup_max: int = _number(5, 1, 64)
    """ngram: of such places the one with the most tokens the same is taken, up to so many"""
    model: str | None = None
    """draft_model: a smaller model with the same tokens; its path once the model is found"""
    draft_tensor_parallel_size: int = _number(1, 1, 1)
    disable_by_batch_size: int = _number(32, 1, _MAX_COUNT)
    """no guesses in steps that generate for more sequences: computing is then dearer than reading weights"""


METHODS = ("ngram", "draft_model")
_KEYS = {f.name: f.metadata.get("range") for f in fields(Speculation)}


def parse_speculation(given: str | dict[str, Any] | None) -> Speculation | None:
    """Raises UsageError naming key, value and limit."""
    if given is None:
        return None
    settings = _read_object(given)
    settings = {key: value for key, value in settings.items() if value is not None}
    for key, value in settings.items():
        if key not in _KEYS:
            raise _bad_speculation(f"unknown key {_short(key)}", ", ".join(_KEYS), "correct it or leave it out")
        limits = _KEYS[key]
        if limits is not None and not limits.holds(value):
            raise _bad_speculation(f"{key} is {_short(value)}", f"{limits}", "choose a whole number within it")
        if limits is None and not (isinstance(value, str) and value):
            raise _bad_speculation(f"{key} is {_short(value)}", "a text", "correct it")
    if settings.get("model") in ("ngram", "[ngram]"):  # how older servers were told
        settings = {"method": "ngram", **{key: value for key, value in settings.items() if key != "model"}}
    method = settings.setdefault("method", "draft_model" if "model" in settings else None)
    if method not in METHODS:
        what = "method is missing" if method is None else f"method is {_short(method)}"
        raise _bad_speculation(what, " or ".join(METHODS), "choose one")
    return _checked(Speculation(**_lookup_lengths(settings)))


def _read_object(given: str | dict[str, Any]) -> dict[str, Any]:
    read: Any = given
    if isinstance(given, str):
        try:
            read = json.loads(given)
        except (ValueError, RecursionError):
            raise _bad_speculation(f"{_short(given)} is no JSON", "an object", f"such as {_EXAMPLE}") from None
    if not isinstance(read, dict):
        raise _bad_speculation(f"{_short(read)} is no object", "an object", f"such as {_EXAMPLE}")
    return read


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}'


def _lookup_lengths(settings: dict[str, Any]) -> dict[str, Any]:
    """Where one of the two is given, the other is the same."""
    least, most = settings.get("prompt_lookup_min"), settings.get("prompt_lookup_max")
    given = {"prompt_lookup_min": least or most, "prompt_lookup_max": most or least}
    return {**settings, **(given if least or most else {})}


def _checked(speculation: Speculation) -> Speculation:
    if speculation.num_speculative_tokens is None:
        raise _bad_speculation("num_speculative_tokens is missing", f"{_KEYS['num_speculative_tokens']}", "give it")
    if speculation.prompt_lookup_min > speculation.prompt_lookup_max:
        raise _bad_speculation(
            f"prompt_lookup_min is {speculation.prompt_lookup_min}",
            f"prompt_lookup_max, {speculation.prompt_lookup_max}", "lower it",
        )  # fmt: skip
    if speculation.method == "draft_model" and speculation.model is None:
        raise _bad_speculation("model is missing", "method draft_model needs one", "name a smaller model")
    if speculation.method == "ngram" and speculation.model is not None:
        raise _bad_speculation(f"model is {_short(speculation.model)}", "method ngram uses none", "leave one out")
    return speculation


def _bad_speculation(what: str, limit: str, fix: str) -> UsageError:
    return UsageError(f"--speculative-config: {what}", limit=limit, fix=fix, param="speculative_config")


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
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kv_offloading_bytes: int = 0
    kv_offloading_dir: str | None = None
    kv_offloading_dir_bytes: int = 0
    speculative_config: Speculation | None = None
    enable_lora: bool = False
    lora_modules: tuple[tuple[str, str], ...] = ()
    """name and absolute path of each"""
    max_loras: int = 8
    max_lora_rank: int = 64
    tokenizer: str | None = None
    """file or folder, for structured output; set by `model_text.prepare`"""
    max_model_len_asked: bool = False
    """the user named `max_model_len`: a KV cache too small for it is then an error, not a shorter context"""
    max_unacked_messages: int = 256
    """Output messages an API process may leave unacknowledged before its requests are no longer scheduled."""
    warnings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> EngineConfig:
        tuples: dict[str, Any] = {k: tuple(fields[k]) for k in ("eos_token_ids", "warnings")}
        tuples["lora_modules"] = tuple((name, path) for name, path in fields["lora_modules"])
        speculation = fields["speculative_config"]
        if speculation is not None:
            speculation = Speculation(**speculation)
        return EngineConfig(**{**fields, **tuples, "speculative_config": speculation})


def resolve(args: EngineArgs, facts: ModelFacts) -> EngineConfig:
    """Checks every setting against its limits and fills in the defaults.

    Raises UsageError naming flag, value, limit and fix.
    """
    args.verify()
    if args.dtype not in DTYPES:
        raise UsageError(f"--dtype {args.dtype} is unknown", fix=f"one of {', '.join(DTYPES)}", param="dtype")
    if args.scheduling_policy not in POLICIES:
        raise UsageError(
            f"--scheduling-policy {args.scheduling_policy} is unknown", fix=f"one of {', '.join(POLICIES)}",
            param="scheduling_policy",
        )  # fmt: skip
    _check_offloading(args)
    if args.async_scheduling and args.speculative_config is not None:
        raise UsageError(
            "--async-scheduling cannot be had together with --speculative-config",
            limit="a step is planned once the guesses of the one before are judged", fix="leave one of them out",
            param="async_scheduling",
        )  # fmt: skip
    _check_unused(args)
    max_model_len = facts.context_len if args.max_model_len is None else args.max_model_len
    if max_model_len > facts.context_len:
        raise UsageError(
            f"--max-model-len {max_model_len} is longer than the model's context",
            limit=f"{facts.context_len} tokens", fix="lower --max-model-len or leave it out", param="max_model_len",
        )  # fmt: skip
    max_num_seqs = args.max_num_seqs or 256
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
        block_size=args.block_size, gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes, num_gpu_blocks_override=args.num_gpu_blocks_override,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, tensor_parallel_size=args.tensor_parallel_size,
        threads=args.threads, seed=args.seed, scheduling_policy=args.scheduling_policy,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        max_num_queued_reqs=args.max_num_queued_reqs, max_num_queued_tokens=args.max_num_queued_tokens,
        async_scheduling=args.async_scheduling, enable_prefix_caching=args.enable_prefix_caching,
        kv_cache_dtype=args.kv_cache_dtype, kv_offloading_bytes=int(args.kv_offloading_size * GIB),
        kv_offloading_dir=args.kv_offloading_dir and os.path.abspath(args.kv_offloading_dir),
        kv_offloading_dir_bytes=int(args.kv_offloading_dir_size * GIB) if args.kv_offloading_dir else 0,
        speculative_config=parse_speculation(args.speculative_config),
        enable_lora=args.enable_lora or bool(args.lora_modules), lora_modules=_lora_modules(args),
        max_loras=args.max_loras, max_lora_rank=args.max_lora_rank,
        max_model_len_asked=args.max_model_len is not None,
    )  # fmt: skip


def _lora_modules(args: EngineArgs) -> tuple[tuple[str, str], ...]:
    """Raises UsageError for what names no adapter, for names that are taken, and for too many."""
    found: dict[str, str] = {}
    served = args.served_model_name or (args.model,)
    for text in args.lora_modules:
        name, path, base = _lora_module(text)
        if not name or not path or not all(isinstance(value, str) for value in (name, path)):
            raise _bad_lora_modules(f"{_short(text)} names no adapter", 'NAME=PATH or {"name": …, "path": …}')
        if name in found or name in served:
            raise _bad_lora_modules(f"{_short(name)} is the name of another model here", "names that differ")
        if base is not None and base not in served:
            raise _bad_lora_modules(f"{_short(text)} is for another model", f"base_model_name {' or '.join(served)}")
        found[name] = os.path.abspath(os.path.expanduser(path))
    if len(found) > args.max_loras:
        raise _bad_lora_modules(f"{len(found)} adapters", f"--max-loras {args.max_loras}")
    return tuple(found.items())


def _lora_module(text: str) -> tuple[Any, Any, Any]:
    """(name, path, name of the model it is for or None)"""
    if not text.lstrip().startswith("{"):
        name, _, path = text.partition("=")
        return name, path, None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise _bad_lora_modules(f"{_short(text)} is no JSON ({err})", "NAME=PATH or a JSON object") from err
    unknown = set(fields) - {"name", "path", "base_model_name"}
    if unknown:
        raise _bad_lora_modules(f"{_short(text)} holds {sorted(unknown)[0]!r}", "name, path, base_model_name")
    return fields.get("name"), fields.get("path"), fields.get("base_model_name")


def _bad_lora_modules(cause: str, limit: str) -> UsageError:
    return UsageError(f"--lora-modules: {cause}", limit=limit, fix="correct it", param="lora_modules")


def _check_offloading(args: EngineArgs) -> None:
    """Blocks reach the folder through host memory, under the keys of the prefix cache, and whole."""
    if args.kv_offloading_dir is None:
        return
    limit = fix = None
    if args.kv_offloading_size == 0:
        limit, fix = "blocks get there through host memory", "give --kv-offloading-size as well"
    elif not args.enable_prefix_caching:
        limit, fix = "the prefix cache finds the blocks", "leave --no-enable-prefix-caching out"
    elif args.tensor_parallel_size > 1:
        limit, fix = "--tensor-parallel-size 1", "leave it out: several ranks can use host memory only"
    if limit is not None:
        cause, param = f"--kv-offloading-dir {args.kv_offloading_dir} cannot be used", "kv_offloading_dir"
        raise UsageError(cause, limit=limit, fix=fix, param=param)


def _check_unused(args: EngineArgs) -> None:
    """Raises UsageError for a setting that would have no effect beside the others."""
    adapters = args.enable_lora or bool(args.lora_modules)
    for name, needed, there in (
        ("kv_offloading_dir_size", "only with --kv-offloading-dir", args.kv_offloading_dir is not None),
        ("max_loras", "only with --enable-lora or --lora-modules", adapters),
        ("max_lora_rank", "only with --enable-lora or --lora-modules", adapters),
    ):
        value = getattr(args, name)
        if not there and value != EngineArgs.__dataclass_fields__[name].default:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value} has no effect", limit=needed, fix="give that too, or leave it out",
                             param=name)  # fmt: skip


@dataclass(frozen=True)
class ServerArgs:
    """How the HTTP server listens and behaves; nothing here reaches the engine."""

    host: str = "127.0.0.1"
    port: int = _number(8000, 0, MAX_PORT)
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = _number(16 << 20, 1, 1 << 32)
    """a larger request body is answered 413"""
    max_buffered_events: int = _number(4096, 1, 1 << 24)
    """token events held for a client that reads too slowly, before its request is aborted"""
    shutdown_timeout_s: float = _number(30.0, 0, 86400, float)
    """after SIGTERM, how long running requests may take to finish"""
    enable_prompt_tokens_details: bool = False
    """usage says how many prompt tokens were cached"""
    log_requests: bool = False
    access_log: bool = False
    log_level: str = "info"

    def verify(self) -> None:
        _verify(self)
