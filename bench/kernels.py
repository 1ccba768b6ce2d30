"""The CPU kernels alone: packed linear layers against torch's, and attention. python -m bench.kernels [--json FILE]"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

from bench.interleave import interleave
from octavo.backends.base import AttentionMeta
from octavo.backends.cpu import lib, limits
from octavo.backends.cpu.ops import CpuOps, PanelKVCache
from octavo.backends.kv import KV_FORMATS, FullAttention

SHAPES = {
    "SmolLM2-135M": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536),
                     "output": (49152, 576)},
    "Qwen2.5-0.5B": {"qkv": (1152, 896), "o": (896, 896), "gate_up": (9728, 896), "down": (896, 4864),
                     "output": (151936, 896)},
}  # fmt: skip
"""out and in features"""
ROWS = (1, 8, 32, 512)
ATTENTION = {"SmolLM2-135M": (9, 3, 64), "Qwen2.5-0.5B": (14, 2, 64), "Qwen2.5-1.5B": (12, 2, 128)}
"""heads, kv heads, head_dim"""
CONTEXT, PAGE = 1024, 16
STEPS = (("decode 1", 1, 1), ("decode 32", 32, 1), ("prefill", 1, CONTEXT))
"""name, sequences, queries of each"""
FORMS = {"bf16": None} | {form.name: form for form in KV_FORMATS.values()}
COPIES_BYTES = 256 << 20


def best_seconds(runs, rounds, min_seconds):
    """The fastest call of each: what the kernel does while nobody disturbs it."""
    return {name: min(times) for name, times in interleave(runs, rounds, min_seconds).items()}


def in_turn(call, items):
    """Calls with the next of `items` each time."""
    turn = itertools.cycle(items)
    return lambda: call(next(turn))


def bench_linear(ops, rounds):
    """Each call takes the next of many copies of a weight, as layers do: it is never in a cache from the last call."""
    for model, shapes in SHAPES.items():
        for name, (n, k) in shapes.items():
            copies = min(40, max(1, COPIES_BYTES // (n * k * 2)))
            weights = [torch.randn(n, k).bfloat16() for _ in range(copies)]
            packed = [ops.pack_linear(weight, None) for weight in weights]
            for rows in ROWS:
                if rows * n > 1 << 24:
                    continue  # logits of a whole prompt are never computed
                x = torch.randn(rows, k).bfloat16()
                seconds = best_seconds(
                    {"octavo": in_turn(partial(ops.linear, x), packed), "torch": in_turn(partial(linear, x), weights)},
                    rounds, 0.02,
                )  # fmt: skip
                yield {
                    "kernel": "linear", "model": model, "name": name, "out": n, "in": k, "rows": rows,
                    "us": seconds["octavo"] * 1e6, "torch_us": seconds["torch"] * 1e6,
                    "gb_s": n * k * 2 / seconds["octavo"] / 1e9, "gflop_s": 2 * rows * n * k / seconds["octavo"] / 1e9,
                }  # fmt: skip


def bench_attention(ops, rounds):
    """Decoding of one and of 32 sequences, and a prompt of 1024, over a context of 1024, in each form of KV cache.

    Each call takes the next of many contexts in a large cache: it is in no cache of the CPU from the last call, as
    other layers and the weights have been there since. `ratio` is bf16's time over this form's.
    """
    for (model, shape), (label, sequences, queries) in itertools.product(ATTENTION.items(), STEPS):
        heads, kv_heads, dim = shape
        copies = max(1, COPIES_BYTES // 4 // (sequences * CONTEXT * kv_heads * dim * 4))
        metas = [context_of(sequences, queries, copy) for copy in range(copies)]
        q = torch.randn(sequences * queries, heads, dim).bfloat16()
        runs, page_bytes = {}, {}
        for name, form in FORMS.items():
            cache = PanelKVCache(FullAttention(kv_heads, dim), copies * sequences * CONTEXT // PAGE, PAGE, form)
            page_bytes[name] = (cache.k.nbytes + cache.v.nbytes) / len(cache.k)
            for meta in metas:
                ops.write_kv(*torch.randn(2, len(meta.slots), kv_heads, dim).bfloat16(), cache, meta)
            runs[name] = in_turn(partial(attend, ops, q, cache), metas)
        seconds = best_seconds(runs, rounds, 0.02)
        work = 4 * sequences * queries * (CONTEXT if queries == 1 else CONTEXT / 2) * heads * dim
        for name, took in seconds.items():
            yield {
                "kernel": "attention", "model": model, "name": f"{label} {name}", "rows": sequences * queries,
                "us": took * 1e6, "ratio": seconds["bf16"] / took, "gflop_s": work / took / 1e9,
                "gb_s": page_bytes[name] * sequences * CONTEXT / PAGE / took / 1e9,
            }  # fmt: skip


def attend(ops, q, cache, meta):
    return ops.attention(q, cache, meta, q.shape[-1] ** -0.5, None)


def context_of(sequences, queries, copy):
    """The last `queries` tokens of sequences of CONTEXT tokens each, in the copy-th part of a cache."""
    pages, tokens = sequences * CONTEXT // PAGE, sequences * CONTEXT
    return AttentionMeta(
        torch.arange(sequences + 1, dtype=torch.int32) * queries,
        torch.full((sequences,), CONTEXT, dtype=torch.int32),
        (torch.arange(pages, dtype=torch.int32) + copy * pages).view(sequences, -1),
        torch.arange(tokens) + copy * tokens, PAGE,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=limits.default_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", help="a lesser instruction set than the machine has")
    parser.add_argument("--only", choices=["linear", "attention"])
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    library = lib.load()
    if library is None:
        raise SystemExit("the kernels are not built: pip install .")
    kernels = library.kernels(arguments.isa)
    library.set_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    ops = CpuOps(kernels)
    table = Table(title=f"{kernels.isa}, {arguments.threads} threads")
    for column in ("model", "kernel", "rows", "µs", "torch µs", "ratio", "GB/s", "GFLOP/s"):
        table.add_column(column, justify="left" if column in ("model", "kernel") else "right")
    results = []
    with torch.inference_mode():
        for name, bench in (("linear", bench_linear), ("attention", bench_attention)):
            if arguments.only not in (None, name):
                continue
            for r in bench(ops, arguments.rounds):
                results.append(r)
                other = r.get("torch_us", math.nan)
                ratio = r.get("ratio", other / r["us"])
                table.add_row(
                    r["model"], f"{r['kernel']} {r['name']}", str(r["rows"]), f"{r['us']:.0f}", f"{other:.0f}",
                    f"{ratio:.2f}", f"{r['gb_s']:.1f}", f"{r['gflop_s']:.0f}",
                )  # fmt: skip
    Console().print(table)
    if arguments.json:
        facts = {"machine": platform.processor() or platform.machine(), "isa": kernels.isa}
        arguments.json.write_text(json.dumps({**facts, "threads": arguments.threads, "results": results}, indent=1))


if __name__ == "__main__":
    main()
