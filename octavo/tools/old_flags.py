"""Flags of older vLLM servers and of the guides written for them, and what becomes of each here.

`translate` turns an old command line into one of today's. Nothing is dropped in silence: a flag is renamed, left out
with a warning that says why that changes nothing or what to use, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.errors import UsageError

Action = Literal["rename", "speculation", "default", "no-op", "refuse"]
"""`speculation`: it becomes the key `text` of --speculative-config. `default`: what it asks for happens anyway.
`no-op`: it asks for what does not exist here, and the server can do without. `refuse`: going on without it would serve
something other than what was asked for."""


@dataclass(frozen=True)
class OldFlag:
    """`values`: takes "none", "one", "many", or perhaps a "bool". A refused flag is left out for a `harmless` value."""

    name: str
    values: Literal["none", "one", "many", "bool"]
    action: Action
    text: str
    harmless: tuple[str, ...] = ()


_RAY = "ray is not used; each rank of --tensor-parallel-size is a process on this machine; leave the flag out"
_GRAPHS = "no graphs are captured and nothing is compiled in this version; leave the flag out"
_SPECULATION = "use --speculative-config with JSON of num_speculative_tokens and method or model"
_TOOLS = "tool and reasoning parsers are not in this version; remove the flag"
_STRUCTURED = "llguidance is the only backend of structured output; leave the flag out"
_ROPE = "the scaling of positions comes from the model's own config.json; change it there"
_REVISION = "revisions are not looked up; download that revision and give its folder as the model"
_TLS = "the server speaks plain HTTP; end TLS in a proxy before it"
_IMAGES = "only text models are served in this version; remove the flag"
_ADAPTER_TOKENS = "adapters with tokens of their own are not supported; remove the flag"
_NO_CODE = "code from a model's repository is never run; leave the flag out"
_RECOMPUTE = "a preempted sequence is swapped or recomputed, whichever is faster; leave the flag out"
_BLOCKS = "paged block tables are the only memory manager; leave the flag out"

OLD_FLAGS = (
    OldFlag("--paged-attention-block-size", "one", "rename", "--block-size"),
    OldFlag("--max-model-length", "one", "rename", "--max-model-len"),
    OldFlag("--disable-log-requests", "none", "default", "requests are logged only with --enable-log-requests"),
    OldFlag("--disable-log-stats", "none", "default", "figures stand in /metrics and are not logged"),
    OldFlag("--disable-uvicorn-access-log", "none", "default", "calls are logged only with --enable-access-log"),
    OldFlag("--enable-chunked-prefill", "bool", "default",
            "prompts are always split to fit --max-num-batched-tokens; leave the flag out"),
    OldFlag("--use-v2-block-manager", "none", "default", _BLOCKS),
    OldFlag("--worker-use-ray", "none", "no-op", _RAY),
    OldFlag("--engine-use-ray", "none", "no-op", _RAY),
    OldFlag("--distributed-executor-backend", "one", "no-op", _RAY),
    OldFlag("--preemption-mode", "one", "no-op", _RECOMPUTE),
    OldFlag("--trust-remote-code", "none", "no-op", _NO_CODE),
    OldFlag("--code-revision", "one", "no-op", _NO_CODE),
    OldFlag("--enforce-eager", "none", "no-op", _GRAPHS),
    OldFlag("--max-seq-len-to-capture", "one", "no-op", _GRAPHS),
    OldFlag("--max-context-len-to-capture", "one", "no-op", _GRAPHS),
    OldFlag("--compilation-config", "one", "no-op", _GRAPHS),
    OldFlag("--disable-custom-all-reduce", "none", "no-op", "there is one all-reduce; leave the flag out"),
    OldFlag("--num-scheduler-steps", "one", "no-op", "every step is planned by itself; leave the flag out"),
    OldFlag("--multi-step-stream-outputs", "bool", "no-op", "every step is planned by itself; leave the flag out"),
    OldFlag("--scheduler-delay-factor", "one", "no-op", "waiting requests start at the next step; leave the flag out"),
    OldFlag("--max-paddings", "one", "no-op", "batches are never padded; leave the flag out"),
    OldFlag("--max-parallel-loading-workers", "one", "no-op", "weights are memory-mapped; leave the flag out"),
    OldFlag("--ignore-patterns", "many", "no-op", "only the files that a model needs are read; leave the flag out"),
    OldFlag("--max-log-len", "one", "no-op", "prompts are never logged; leave the flag out"),
    OldFlag("--disable-frontend-multiprocessing", "none", "no-op",
            "the engine always runs in a process of its own; leave the flag out"),
    OldFlag("--disable-async-output-proc", "none", "no-op", "text is always made in the API process; leave it out"),
    OldFlag("--block-allocator", "one", "no-op", _BLOCKS),
    OldFlag("--max-cpu-loras", "one", "no-op", "--max-loras says how many adapters are loaded; leave the flag out"),
    OldFlag("--fully-sharded-loras", "none", "no-op", "ranks share adapters as they share the model; leave it out"),
    OldFlag("--lora-dtype", "one", "refuse", "adapters are computed in the model's dtype; remove the flag", ("auto",)),
    OldFlag("--lora-extra-vocab-size", "one", "refuse", _ADAPTER_TOKENS, ("0", "256")),
    OldFlag("--long-lora-scaling-factors", "one", "refuse", "an adapter cannot lengthen the context; remove the flag"),
    OldFlag("--enable-lora-bias", "none", "refuse", "adapters with biases are not supported; remove the flag"),
    OldFlag("--enable-prompt-adapter", "none", "refuse", "the only adapters are LoRA: use --enable-lora"),
    OldFlag("--max-prompt-adapters", "one", "refuse", "the only adapters are LoRA: use --max-loras"),
    OldFlag("--max-prompt-adapter-token", "one", "refuse", "the only adapters are LoRA; remove the flag"),
    OldFlag("--load-format", "one", "refuse",
            "weights are read from GGUF or safetensors; convert them", ("auto", "safetensors", "gguf")),
    OldFlag("--tokenizer-mode", "one", "refuse", "only fast tokenizers are used; remove the flag", ("auto", "hf")),
    OldFlag("--config-format", "one", "refuse", "a model's config.json is read; convert the model", ("auto", "hf")),
    OldFlag("--quantization", "one", "refuse",
            "not supported for now; use a GGUF file (Q4_K_M, Q8_0, …) or unquantized safetensors", ("gguf", "none")),
    OldFlag("-q", "one", "refuse", "see --quantization; use a GGUF file or unquantized safetensors", ("gguf", "none")),
    OldFlag("--quantization-param-path", "one", "refuse", "scales are read from the checkpoint only; remove it"),
    OldFlag("--calculate-kv-scales", "bool", "refuse", "--kv-cache-dtype int8 finds its own; remove it"),
    OldFlag("--pipeline-parallel-size", "one", "refuse", "use --tensor-parallel-size", ("1",)),
    OldFlag("-pp", "one", "refuse", "use --tensor-parallel-size", ("1",)),
    OldFlag("--data-parallel-size", "one", "refuse", "start one server a replica", ("1",)),
    OldFlag("-dp", "one", "refuse", "start one server a replica", ("1",)),
    OldFlag("--enable-expert-parallel", "none", "refuse", "no mixture of experts in this version; remove the flag"),
    OldFlag("--cpu-offload-gb", "one", "refuse", "weights stay on the device; use a smaller quantization", ("0",)),
    OldFlag("--num-lookahead-slots", "one", "refuse", _SPECULATION, ("0",)),
    OldFlag("--speculative-model", "one", "speculation", "model"),
    OldFlag("--spec-model", "one", "speculation", "model"),
    OldFlag("--spec-method", "one", "speculation", "method"),
    OldFlag("--num-speculative-tokens", "one", "speculation", "num_speculative_tokens"),
    OldFlag("--spec-tokens", "one", "speculation", "num_speculative_tokens"),
    OldFlag("--ngram-prompt-lookup-max", "one", "speculation", "prompt_lookup_max"),
    OldFlag("--ngram-prompt-lookup-min", "one", "speculation", "prompt_lookup_min"),
    OldFlag("--speculative-disable-by-batch-size", "one", "speculation", "disable_by_batch_size"),
    OldFlag("--speculative-draft-tensor-parallel-size", "one", "speculation", "draft_tensor_parallel_size"),
    OldFlag("--rope-scaling", "one", "refuse", _ROPE),
    OldFlag("--rope-theta", "one", "refuse", _ROPE),
    OldFlag("--hf-overrides", "one", "refuse", "edit the model's config.json instead"),
    OldFlag("--override-generation-config", "one", "refuse", "edit generation_config.json, or send them by request"),
    OldFlag("--revision", "one", "refuse", _REVISION),
    OldFlag("--tokenizer-revision", "one", "refuse", _REVISION),
    OldFlag("--task", "one", "refuse", "only text generation is served", ("auto", "generate")),
    OldFlag("--response-role", "one", "refuse", "answers have the role assistant", ("assistant",)),
    OldFlag("--enable-auto-tool-choice", "none", "refuse", _TOOLS),
    OldFlag("--tool-call-parser", "one", "refuse", _TOOLS),
    OldFlag("--enable-reasoning", "none", "refuse", _TOOLS),
    OldFlag("--reasoning-parser", "one", "refuse", _TOOLS),
    OldFlag("--guided-decoding-backend", "one", "refuse", _STRUCTURED, ("auto", "guidance")),
    OldFlag("--limit-mm-per-prompt", "one", "refuse", _IMAGES),
    OldFlag("--skip-tokenizer-init", "none", "refuse", "the API process needs the tokenizer; remove the flag"),
    OldFlag("--disable-sliding-window", "none", "refuse", "the model's attention windows are kept; remove the flag"),
    OldFlag("--additional-config", "one", "refuse", "these are options of a plugin for another engine; remove it"),
    OldFlag("--otlp-traces-endpoint", "one", "refuse", "traces are not exported in this version; remove the flag"),
    OldFlag("--ssl-keyfile", "one", "refuse", _TLS),
    OldFlag("--ssl-certfile", "one", "refuse", _TLS),
    OldFlag("--root-path", "one", "refuse", "strip the path in the proxy"),
)  # fmt: skip

_BY_NAME = {flag.name: flag for flag in OLD_FLAGS}

MANY_AT_ONCE = ("--served-model-name", "--api-key", "--allowed-origins", "--lora-modules")
"""Today's flags that take one value each time, and took several in one go."""


@dataclass(frozen=True)
class Translation:
    """Arguments of today's `octavo serve`, a line for each flag that changed, and whether a model is named."""

    argv: list[str]
    warnings: list[str]
    has_model: bool


def hint(name: str) -> str | None:
    """What to do instead of an old flag; None for a flag that never was."""
    if name == "--model":
        return "the model is an argument: octavo serve MODEL"
    flag = _BY_NAME.get(name.replace("_", "-"))
    if flag is None:
        return None
    if flag.action == "speculation":
        return f'use --speculative-config with JSON that has "{flag.text}"'
    return f"use {flag.text}" if flag.action == "rename" else flag.text


def translate(argv: Sequence[str]) -> Translation:
    """Today's form of an old command line. Raises UsageError for a flag that is refused, or one without its value."""
    kept: list[str] = []
    warnings: list[str] = []
    model: list[str] = []
    speculation: dict[str, str | int] = {}
    for name, values, original in _flags(argv):
        old = _BY_NAME.get(name)
        said = " ".join([name, *values])
        if name == "--model":
            model = values
        elif name in MANY_AT_ONCE:
            kept += [word for value in values for word in (name, value)]
        elif old is None:
            kept += original
        elif old.action == "rename":
            kept += [old.text, *values]
            warnings.append(f"{said}: outdated, use {old.text} {' '.join(values)}")
        elif old.action == "speculation":
            is_count = old.text not in ("model", "method") and values[0].isdecimal()
            speculation[old.text] = int(values[0]) if is_count else values[0]
            warnings.append(f"{said}: outdated, {hint(name)}")
        elif old.action == "refuse" and not (values and values[0].lower() in old.harmless):
            raise UsageError(f"{said} cannot be honoured", fix=old.text, param=name.lstrip("-"))
        else:
            reason = "this is what happens anyway; leave the flag out" if old.action == "refuse" else old.text
            warnings.append(f"{said}: outdated, {reason}")
    if speculation:
        kept += ["--speculative-config", json.dumps(speculation)]
    return Translation([*model, *kept], warnings, bool(model))


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """(normalized name, values of an old flag or --model, the words as they stood), in order."""
    words = list(argv)
    while words:
        word = words.pop(0)
        head, equals, value = word.partition("=")
        name = head.replace("_", "-") if head.startswith("--") else head
        old = _BY_NAME.get(name)
        takes = old.values if old else "one" if name == "--model" else "many" if name in MANY_AT_ONCE else "none"
        values = [value] if equals else []
        original = [word]
        while words and not equals and _takes_more(takes, values, words[0]):
            values.append(words[0])
            original.append(words.pop(0))
        if takes == "one" and not values:
            raise UsageError(f"{name} needs a value", fix=f"write {name} VALUE or leave it out")
        yield name, values, original


def _takes_more(takes: str, values: list[str], word: str) -> bool:
    if takes == "many":
        return not word.startswith("-")
    if takes == "bool":
        return not values and word.lower() in ("true", "false")
    return takes == "one" and not values
