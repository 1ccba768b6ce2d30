"""Octavo against transformers on one model and this machine, in turns. python -m bench.vs_transformers [MODEL]

MODEL is a name that Octavo knows, a GGUF file or a directory. Octavo runs whole, engine process and all, through the
Python API; transformers runs in this process, both in bf16. Decoding speed is that of n tokens more than one.
"""

from __future__ import annotations

import argparse
import json
import random
from functools import partial
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from bench.interleave import interleave
from octavo import LLM, SamplingParams
from octavo.backends.cpu.limits import default_threads
from octavo.hub.resolve import resolve_model

PROMPT = 128
LONG_PROMPT = 1024
BATCHES = {1: 64, 8: 32, 32: 16}
"""sequences, and tokens that each generates"""
TOKENS = range(100, 30000)


def prompts(batch, length):
    return [random.choices(TOKENS, k=length) for _ in range(batch)]


class Transformers:
    def __init__(self, path: Path) -> None:
        folder, settings = path, {}
        if path.is_file():
            folder, settings["gguf_file"] = path.parent, path.name
            if hasattr(transformers, "GgufConfig"):  # else it would keep the blocks, which is far slower in bf16
                settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **settings).eval()
        self.model.generation_config = transformers.GenerationConfig()  # greedy, whatever the model recommends

    def generate(self, batch, length, count):
        ids = torch.tensor(prompts(batch, length))
        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                pad_token_id=2,
            )  # fmt: skip


class Octavo:
    def __init__(self, path: Path, threads: int) -> None:
        self.llm = LLM(model=str(path), dtype="bfloat16", threads=threads, max_model_len=2048)

    def generate(self, batch, length, count):
        wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        asked = [{"prompt_token_ids": ids} for ids in prompts(batch, length)]
        answers = self.llm.generate(asked, wanted, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == count for answer in answers)


def measure(engines, rounds):
    """Yields (what, {engine: tokens/s}), from the fastest round of each: the one that others disturbed least."""
    for batch, count in BATCHES.items():
        runs = {(n, c): partial(e.generate, batch, PROMPT, c) for n, e in engines.items() for c in (1, count + 1)}
        best = {key: min(times) for key, times in interleave(runs, rounds).items()}
        yield f"decode, batch {batch}", {n: batch * count / (best[n, count + 1] - best[n, 1]) for n in engines}
    times = interleave({n: partial(e.generate, 1, LONG_PROMPT, 1) for n, e in engines.items()}, rounds)
    yield f"prefill {LONG_PROMPT}", {n: LONG_PROMPT / min(times[n]) for n in engines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    path = resolve_model(arguments.model, None, None)
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    engines = {"octavo": Octavo(path, arguments.threads), "transformers": Transformers(path)}
    table = Table(title=f"{path.name}, bf16, {arguments.threads} threads, tokens/s")
    for column in ("", *engines, "ratio"):
        table.add_column(column, justify="right" if column else "left")
    results = {}
    for what, speeds in measure(engines, arguments.rounds):
        results[what] = speeds
        ratio = speeds["octavo"] / speeds["transformers"]
        table.add_row(what, *(f"{speed:.1f}" for speed in speeds.values()), f"{ratio:.2f}")
    engines["octavo"].llm.close()
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": path.name, "threads": arguments.threads, "tokens/s": results}))


if __name__ == "__main__":
    main()
