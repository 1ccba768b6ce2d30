"""What a step costs the host: the engine's loop on the device that computes nothing. python -m bench.host_overhead

All of the loop counts: taking in messages, planning, building the batch, the state of penalties and sampling,
committing, encoding and sending. Each figure is the median over the steps in which all sequences generate,
and "cpu" the CPU time of all threads, which tells more where others use the machine too.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.local_engine import MemoryLinks, Steps, measure, simulated_config, start
from octavo.engine.core import Engine
from octavo.engine.types import Request, SamplingParams

SEQUENCES = (1, 64, 256)
LIMITS_US = {1: 200, 64: 1000, 256: 3000}
GREEDY = {"temperature": 0.0}
SAMPLED = {
    "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1,
}  # fmt: skip
COLD = (256, 128)
"""tokens of prompt and answer, about as many as in a mix of chat and code"""
COLD_ROUNDS = 21
MODES = {"greedy": GREEDY, "sampled, penalties": SAMPLED}


def requests(count: int, prompt: int, output: int, mode: str) -> list[Request]:
    """Prompts of random tokens, each sampled one with a seed."""
    made = []
    for index in range(count):
        seed = {} if mode == "greedy" else {"seed": index}
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, **MODES[mode], **seed)
        tokens = [random.randrange(100_000) for _ in range(prompt)]
        made.append(Request(request_id=f"r{index}", prompt_token_ids=tokens, sampling=sampling))
    return made


def quarter_growth(seconds: list[float]) -> float:
    """The median of the last quarter of steps, over that of the first."""
    quarter = max(1, len(seconds) // 4)
    return statistics.median(seconds[-quarter:]) / statistics.median(seconds[:quarter])


def cells(config, executor, arguments):
    """Yields a row of the table for each number of sequences, mode, and length of prompt and answer."""
    for prompt, output in ((128, 128), (128, arguments.long), (4000, 128)):
        for count in SEQUENCES:
            if count * (prompt + output) > arguments.most_tokens:
                continue
            for mode in MODES:
                runs = [
                    measure(config, executor, requests(count, prompt, output, mode)) for _ in range(arguments.rounds)
                ]
                medians = [statistics.median(run.of(count)) for run in runs]
                best: Steps = runs[medians.index(min(medians))]
                columns = {"cpu": best.cpu_seconds, **best.parts}
                parts = {name: statistics.median(best.of(count, spent)) * 1e6 for name, spent in columns.items()}
                growth = quarter_growth(best.of(count))
                yield {
                    "sequences": count, "mode": mode, "prompt": prompt, "output": output, "us": min(medians) * 1e6,
                    "growth": growth, "limit_us": LIMITS_US[count], **parts,
                }  # fmt: skip


def cold_cost(folder: Path, rounds: int) -> dict[str, float]:
    """CPU seconds of traffic without common prefixes, with the prefix cache and without, in turns."""
    totals: dict[bool, list[float]] = {True: [], False: []}
    engines = {}
    for cached in totals:
        config = simulated_config(folder, enable_prefix_caching=cached, async_scheduling=False)
        engines[cached] = (config, start(config, str(folder)))
    for turn in range(rounds):
        asked = requests(128, *COLD, "sampled, penalties")
        for cached, (config, executor) in sorted(engines.items(), reverse=turn % 2 == 0):
            engine = Engine(config, MemoryLinks(asked), executor)
            began = time.process_time()
            engine.run()
            totals[cached].append(time.process_time() - began)
    ratios = [on / off for on, off in zip(totals[True], totals[False], strict=True)]
    return {"with": min(totals[True]), "without": min(totals[False]), "ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many counts")
    parser.add_argument("--long", type=int, default=2000, help="tokens of the long answers")
    parser.add_argument("--most-tokens", type=int, default=600_000, help="leaves out cells with more than these in all")
    parser.add_argument("--plain", action="store_true", help="plan a step after the one before, not while it runs")
    parser.add_argument("--no-cold", action="store_true", help="leave out the cost of the prefix cache")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    results, cold = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = simulated_config(folder, async_scheduling=not arguments.plain)
        executor = start(config, name)
        table = Table(title=f"µs a step, {'plain' if arguments.plain else 'overlapped'} loop")
        for column in ("sequences", "mode", "prompt", "output", "limit", "all", "last/first quarter", *PARTS):
            table.add_column(column, justify="left" if column == "mode" else "right")
        for row in cells(config, executor, arguments):
            results.append(row)
            table.add_row(
                str(row["sequences"]), row["mode"], str(row["prompt"]), str(row["output"]), str(row["limit_us"]),
                f"{row['us']:.0f}", f"{row['growth']:.2f}", *(f"{row[part]:.0f}" for part in PARTS),
            )  # fmt: skip
        Console(width=140).print(table)
        if not arguments.no_cold:
            cold = cold_cost(folder, COLD_ROUNDS)
            print(f"prefix cache, cold traffic: {(cold['ratio'] - 1) * 100:+.1f} % of host time")
    if arguments.json:
        facts = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({**facts, "steps": results, "cold": cold}, indent=1))


PARTS = ("cpu", "receive", "plan", "run", "commit", "send")

if __name__ == "__main__":
    main()
