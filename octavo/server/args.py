"""The flags of every command that starts an engine: one table, flag to field of `EngineArgs` or `ServerArgs`.

`options` makes click options of it, `collect` makes the two dataclasses of what click parsed. A flag that is not in
this table does not exist.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from fractions import Fraction
from typing import Any

import click

from octavo.backends.names import COMPUTED_AS, check_device
from octavo.config import DTYPES, POLICIES, EngineArgs, ServerArgs
from octavo.errors import UsageError
from octavo.formats.text_file import read_text

MAX_CONFIG_BYTES = 64 << 10
"""PyYAML needs seconds for a megabyte"""
MAX_TEMPLATE_BYTES = 1 << 20
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([+-]?\d{1,100}(?:\.\d{1,100})?(?:e\+?\d{1,2})?)([kmgKMG]?)", re.ASCII)


def size(text: str | int) -> int:
    """A count with an optional suffix, read as vLLM does: 32k is 32,000 and 32K is 32,768. Raises BadParameter."""
    found = _SIZE.fullmatch(str(text).strip())
    count = Fraction(found[1]) * SUFFIXES.get(found[2], 1) if found else Fraction(1, 2)
    if count.denominator != 1:
        raise click.BadParameter(f"{text} is not a whole number such as 4096, 32k (32,000) or 32K (32,768).")
    return int(count)


@dataclass(frozen=True)
class Flag:
    """One row of the table. `many` flags are given several times; `switch` flags take no value."""

    names: str
    field: str
    type: Any
    """what click takes as a type"""
    help: str
    many: bool = False
    switch: bool = False
    metavar: str | None = None
    envvar: str | None = None


_DTYPE = click.Choice(list(DTYPES))
_LEVEL = click.Choice(["critical", "error", "warning", "info", "debug"])

FLAGS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        Flag("--served-model-name", "served_model_name", str,
             "Name in the API; may be repeated, the first is the main one.", many=True),
        Flag("--tokenizer", "tokenizer", str, "Folder or tokenizer.json to use instead of the model's own."),
        Flag("--chat-template", "chat_template", str, "Jinja template, or a file that holds one.", metavar="FILE|TEXT"),
        Flag("--generation-config", "generation_config", str,
             "Sampling defaults: auto is the model's own, vllm none, or a folder with generation_config.json.",
             metavar="auto|vllm|FOLDER"),
        Flag("--max-model-len", "max_model_len", size,
             "Longest prompt and answer together, in tokens; default: the model's context, or what of it the KV cache "
             "can hold. As SIZE, 32k is 32,000 and 32K is 32,768."),
        Flag("--download-dir", "download_dir", str, "Where models by name are kept."),
    ),
    "Device and memory": (
        Flag("--device", "device", str,
             "auto, cpu, reference (plain torch) or sim (computes nothing): sim:ascend-910b, which sim alone means, "
             "sim:ascend-310p, sim:a100, sim:h100."),
        Flag("--dtype", "dtype", _DTYPE, "Arithmetic; auto is the device's preferred one."),
        Flag("--threads", "threads", int, "CPU threads of a rank; all cores when left out."),
        Flag("-tp --tensor-parallel-size", "tensor_parallel_size", int, "Ranks that share one model."),
        Flag("--gpu-memory-utilization --device-memory-utilization", "gpu_memory_utilization", float,
             "Fraction of the device's memory to use; default: 0.9, but on the CPU 4 GiB, or half of what is free if "
             "less, for the KV cache."),
        Flag("--kv-cache-memory-bytes", "kv_cache_memory_bytes", size,
             "Size of a rank's KV cache, such as 1G; default: as --gpu-memory-utilization says."),
        Flag("--num-gpu-blocks-override", "num_gpu_blocks_override", int, "Number of KV blocks, instead of a size."),
        Flag("--block-size", "block_size", int,
             "Tokens in a KV block; default: 16, but 128 on a simulated Ascend."),
        Flag("--kv-cache-dtype", "kv_cache_dtype", str,
             "Numbers in the KV cache: auto (those of --dtype), int8, fp8, fp8_e5m2 or fp8_per_token_head.",
             metavar="TYPE"),
        Flag("--enable-prefix-caching/--no-enable-prefix-caching", "enable_prefix_caching", bool,
             "Keep the KV blocks of common beginnings.", switch=True),
        Flag("--kv-offloading-size --swap-space", "kv_offloading_size", float,
             "GiB of host memory for KV blocks that leave the device."),
        Flag("--kv-offloading-dir", "kv_offloading_dir", str,
             "Folder for KV blocks that leave host memory; survives restarts, needs --kv-offloading-size."),
        Flag("--kv-offloading-dir-size", "kv_offloading_dir_size", float, "GiB that the folder may hold."),
    ),
    "Batching and sampling": (
        Flag("--max-num-seqs", "max_num_seqs", int,
             "Sequences that run at once; default: 256, or --max-num-batched-tokens if less."),
        Flag("--max-num-batched-tokens", "max_num_batched_tokens", size, "Tokens in one step; default: 2048."),
        Flag("--scheduling-policy", "scheduling_policy", click.Choice(list(POLICIES)),
             "fcfs, or priority: lower `priority` first."),
        Flag("--long-prefill-token-threshold", "long_prefill_token_threshold", size,
             "Most prompt tokens of one request in a step; 0 no limit."),
        Flag("--max-num-queued-reqs", "max_num_queued_reqs", int,
             "Waiting requests, beyond which the answer is 503; default: no limit."),
        Flag("--max-num-queued-tokens", "max_num_queued_tokens", size,
             "Waiting prompt tokens, beyond which the answer is 503; default: no limit."),
        Flag("--async-scheduling/--no-async-scheduling", "async_scheduling", bool,
             "Plan the next step while one runs; default: on devices that work beside the host.", switch=True),
        Flag("-sc --speculative-config", "speculative_config", str,
             'Guess tokens ahead, such as {"method": "ngram", "num_speculative_tokens": 4} or '
             '{"model": "smaller-model", "num_speculative_tokens": 3}.',
             metavar="JSON"),
        Flag("--max-logprobs", "max_logprobs", int, "Most logprobs that a request may ask for; -1: all tokens."),
        Flag("--seed", "seed", int, "Seed for requests that bring none."),
    ),
    "Adapters (LoRA)": (
        Flag("--enable-lora", "enable_lora", bool,
             "Let clients load adapters (PEFT) from folders that the server can read.", switch=True),
        Flag("--lora-modules", "lora_modules", str,
             "Adapter to load at start; may be repeated, needs no --enable-lora.", many=True,
             metavar="NAME=PATH|JSON"),
        Flag("--max-loras", "max_loras", int, "Adapters loaded at once."),
        Flag("--max-lora-rank", "max_lora_rank", int, "Highest rank of an adapter."),
    ),
    "Server": (
        Flag("--host", "host", str, "Address to listen on; 0.0.0.0 is every interface."),
        Flag("--port", "port", int, "Port to listen on."),
        Flag("--api-key", "api_keys", str,
             "Bearer key that clients must send; may be repeated. Else the environment's OCTAVO_API_KEY.",
             many=True, envvar="OCTAVO_API_KEY"),
        Flag("--allowed-origins", "allowed_origins", str, "Origin that browsers may call from; may be repeated.",
             many=True),
        Flag("--max-body-bytes", "max_body_bytes", size, "Larger request bodies are answered 413."),
        Flag("--max-buffered-events", "max_buffered_events", int,
             "Events held for a slow client before its request ends."),
        Flag("--enable-prompt-tokens-details", "enable_prompt_tokens_details", bool,
             "Say in usage.prompt_tokens_details how many prompt tokens were cached.", switch=True),
        Flag("--shutdown-timeout", "shutdown_timeout_s", float, "Seconds running requests may take after SIGTERM."),
        Flag("--engine-restarts", "engine_restarts", int, "Times a dead engine is started again."),
    ),
    "Logs": (
        Flag("--enable-log-requests", "log_requests", bool, "Log every request.", switch=True),
        Flag("--enable-access-log", "access_log", bool, "Log every HTTP call.", switch=True),
        Flag("--log-level --uvicorn-log-level", "log_level", _LEVEL, "How much to log."),
    ),
}  # fmt: skip

_DEFAULTS = {f.name: f.default for owner in (EngineArgs, ServerArgs) for f in fields(owner) if f.default is not MISSING}


_RANGES = {f.name: f.metadata.get("range") for owner in (EngineArgs, ServerArgs) for f in fields(owner)}


class GroupedOption(click.Option):
    """An option that knows under which heading of the help it stands."""

    group = "Options"

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Raises UsageError, with flag and range, where click has neither."""
        try:
            return super().type_cast_value(ctx, value)
        except click.BadParameter as error:
            flag = next(name for name in self.opts if name.startswith("--"))
            limit, fix = _accepted(self)
            raise UsageError(f"{flag} {_short(value)} cannot be used", limit=limit, fix=fix, param=self.name) from error


def _accepted(option: click.Option) -> tuple[str, str]:
    """(limit, fix) to tell whoever gave an option a value that its type does not take."""
    if isinstance(option.type, click.Choice):
        return ", ".join(option.type.choices), "choose one of these"
    if option.type is click.BOOL:
        return "true or false", "choose one of these"
    bounds = _RANGES.get(option.name or "")
    between = f", {bounds}" if bounds else ""
    if option.type is click.INT:
        return f"a whole number{between}", "give such a number"
    if option.type is click.FLOAT:
        return f"a number{between}", "give such a number"
    return f"a whole number{between}, written such as 4096, 32k (32,000) or 32K (32,768)", "give such a number"


def _short(value: object) -> str:
    shown = str(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


def options(owners: Sequence[type], without: Sequence[str] = ()) -> list[click.Parameter]:
    """Click options for the fields of these dataclasses but those in `without`, and `--config`."""
    wanted = {f.name for owner in owners for f in fields(owner)} - set(without)
    made: list[click.Parameter] = []
    for group, flags in FLAGS.items():
        made += [_option(flag, group) for flag in flags if flag.field in wanted]
    config = click.Option(
        ["--config"], type=str, callback=_read_config, is_eager=True, expose_value=False,
        help="YAML or JSON file of flags; flags on the command line win.", metavar="FILE",
    )  # fmt: skip
    return [*made, config]


def _option(flag: Flag, group: str) -> click.Option:
    default = _DEFAULTS[flag.field]
    shown = f"  [{default}]" if default is not None and default is not False and default != () else ""
    two_ways = "/" in flag.names  # a switch that can be turned off, too: None while nobody said either
    option = GroupedOption(
        [*flag.names.split(), flag.field], type=flag.type, help=flag.help + shown, multiple=flag.many,
        is_flag=flag.switch, default=False if flag.switch and not two_ways else None,
        metavar=flag.metavar, envvar=flag.envvar,
    )  # fmt: skip
    option.group = group
    return option


def _read_config(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Makes the file's values click's defaults. Keys are flag names, with or without dashes, and `model`."""
    if value is None:
        return
    import yaml

    text = read_text(value, "config", MAX_CONFIG_BYTES)
    try:
        read = yaml.load(text, yaml.BaseLoader)  # safe too, and leaves values as they are written, as on a command line
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"--config {value}: {error}", fix="give a YAML or JSON file of flags") from error
    if not isinstance(read, dict):
        raise UsageError(f"--config {value} holds no mapping", fix="write lines such as 'max-num-seqs: 64'")
    by_name = {name.lstrip("-"): p for p in ctx.command.params for name in (*p.opts, p.name or "")}
    found: dict[str, Any] = {}
    for key, setting in read.items():
        known = by_name.get(str(key).replace("_", "-")) or by_name.get(str(key))
        if known is None or known.name is None or known is param:
            raise UsageError(f"--config {value}: unknown key {key}", fix="use the names that --help lists")
        found[known.name] = _config_value(f"--config {value}: {key}", setting, getattr(known, "multiple", False))
    ctx.default_map = found


def _config_value(where: str, setting: object, many: bool) -> str | list[str]:
    """What stands under a key of the file: a text, or for flags that are given several times also a list of texts."""
    given: list[object] = setting if many and isinstance(setting, list) else [setting]
    texts = [text for text in given if isinstance(text, str) and text]
    if len(texts) < len(given) or not texts:
        kind = "a mapping" if isinstance(setting, dict) else "a list" if isinstance(setting, list) else "empty"
        limit = "one value or a list of values" if many else "one value"
        raise UsageError(f"{where} is {kind}", limit=limit, fix="correct it or leave it out")
    return texts if many else texts[0]


def collect(given: dict[str, Any]) -> tuple[EngineArgs, ServerArgs]:
    """The settings that a parsed command line asks for; a warning on stderr where the device does otherwise.

    Raises UsageError for a chat template that is neither a file nor a template, an unknown device, and a value out of
    range.
    """
    given = {**given, "dtype": _computed_dtype(given.get("device") or "auto", given.get("dtype"))}
    if given.get("chat_template"):
        given = {**given, "chat_template": _chat_template(given["chat_template"])}
    given = {**given, "allowed_origins": _origins(given.get("allowed_origins") or ())}
    engine_args, server_args = _make(EngineArgs, given), _make(ServerArgs, given)
    engine_args.verify()
    server_args.verify()
    return engine_args, server_args


def _computed_dtype(device: str, dtype: str | None) -> str | None:
    check_device(device)
    computed = COMPUTED_AS.get((device, DTYPES.get(dtype or "auto", "")))
    if computed is None:
        return dtype
    where = "the CPU" if device == "auto" else f"the device {device}"
    with suppress(OSError):  # a full stderr stops nothing
        print(f"octavo: warning: --dtype {dtype}: {where} computes in {computed} instead", file=sys.stderr, flush=True)
    return computed


def _make(owner: Callable[..., Any], given: dict[str, Any]) -> Any:
    names = {f.name for f in fields(owner)}  # type: ignore[arg-type]
    return owner(**{k: v for k, v in given.items() if k in names and v is not None and v != ()})


def _chat_template(value: str) -> str:
    if "{" in value or "\n" in value:
        return value
    return read_text(value, "chat_template", MAX_TEMPLATE_BYTES)


def _origins(values: Sequence[str]) -> tuple[str, ...]:
    """Origins one by one, or as the JSON list that vLLM's flag takes."""
    found: list[str] = []
    for value in values:
        if not value.lstrip().startswith("["):
            found.append(value)
            continue
        try:
            read = json.loads(value)
        except ValueError:
            read = None
        if not isinstance(read, list) or not all(isinstance(origin, str) for origin in read):
            raise UsageError(f"--allowed-origins {value} is no JSON list of texts", fix="give one origin a flag")
        found += read
    return tuple(found)
