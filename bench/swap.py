"""What a host tier of the KV cache is worth when device memory is short. python -m bench.swap [MODEL]

The device has blocks for `--fit` of the sequences, and all of them are there at once. Two loads, each with a host tier
and without, in turns:

- answers: each request is a prompt and an answer, which is half as long. Sequences are preempted as they grow.
- conversations: each goes on with its answer and a new question until its turns are over.

Without a host tier the device's prefix cache still keeps what it can, as it does by default.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from rich.console import Console
from rich.table import Table

from octavo.config import GIB, EngineArgs, resolve
from octavo.engine.scheduler import Scheduler
from octavo.engine.types import Request, SamplingParams
from octavo.engine.worker import Prepare, Worker
from octavo.hub.resolve import resolve_model
from octavo.models.checkpoint import open_checkpoint

PAGE = 16
TOKENS = range(100, 30000)
MODES = {"recompute": False, "host tier": True}


@dataclass
class Load:
    """Requests and what each answer makes of them: `follow_up` returns the next request of a sequence, or None."""

    first: list[Request]
    follow_up: Callable[[Request, list[int]], Request | None]


@dataclass
class Outcome:
    seconds: float = 0.0
    tokens: int = 0
    """of answers"""
    computed: int = 0
    preemptions: int = 0
    swapped: int = 0
    answers: dict[str, list[int]] = field(default_factory=dict)


def ask(name: str, prompt: list[int], count: int) -> Request:
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, client_id="c")


def loads(options: argparse.Namespace) -> dict[str, Callable[[], Load]]:
    def prompts() -> list[list[int]]:
        rng = random.Random(options.seed)
        return [rng.choices(TOKENS, k=options.context) for _ in range(options.sequences)]

    def answers() -> Load:
        length = options.context // 2
        return Load([ask(str(i), p, length) for i, p in enumerate(prompts())], lambda request, answer: None)

    def conversations() -> Load:
        rng = random.Random(options.seed + 1)

        def follow_up(request: Request, answer: list[int]) -> Request | None:
            who, turn = map(int, request.request_id.split("."))
            if turn + 1 == options.turns:
                return None
            question = rng.choices(TOKENS, k=options.question)
            return ask(f"{who}.{turn + 1}", [*request.prompt_token_ids, *answer, *question], options.answer)

        return Load([ask(f"{i}.0", p, options.answer) for i, p in enumerate(prompts())], follow_up)

    return {"answers": answers, "conversations": conversations}


def run(worker: Worker, load: Load, host: bool, longest: int, options: argparse.Namespace) -> Outcome:
    blocks = options.fit * -(-longest // PAGE)
    slots = 2 * options.sequences * -(-longest // PAGE) if host else 0
    worker.prepare(Prepare(PAGE, (blocks,), longest, (slots,)))
    scheduler = Scheduler(
        worker.layout, max_num_seqs=options.sequences, max_num_batched_tokens=512, max_model_len=longest,
        vocab_size=worker.config.vocab_size, eos_token_ids=(), host=worker.store if host else None,
    )  # fmt: skip
    asked = {request.request_id: request for request in load.first}
    outcome = Outcome()
    begin = time.perf_counter()
    for request in load.first:
        scheduler.add(request, 0.0)
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        before = time.perf_counter()
        result = worker.run(plan)
        result = type(result)(
            result.sampled, result.prompt_logprobs, seconds=time.perf_counter() - before,
            move_seconds=worker.store.seconds,
        )  # fmt: skip
        for _, event in scheduler.commit(plan, result):
            answer = outcome.answers.setdefault(event.request_id, [])
            answer += event.token_ids
            if event.finish_reason is not None and (more := load.follow_up(asked[event.request_id], answer)):
                asked[more.request_id] = more
                scheduler.add(more, 0.0)
    stats = scheduler.snapshot()
    outcome.seconds = time.perf_counter() - begin
    outcome.tokens, outcome.computed = stats.generation_tokens, stats.step_tokens
    outcome.preemptions, outcome.swapped = stats.preemptions, stats.preemptions_swapped
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    for name, default in (("sequences", 32), ("fit", 4), ("context", 512), ("answer", 32), ("question", 32),
                          ("turns", 3), ("rounds", 2), ("seed", 1), ("threads", 2)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--load", nargs="*", default=["answers", "conversations"])
    options = parser.parse_args()
    checkpoint = open_checkpoint(resolve_model(options.model))
    args = EngineArgs(options.model, device="cpu", threads=options.threads, block_size=PAGE, max_num_seqs=32)
    worker = Worker(resolve(args, checkpoint.facts()), 0, "")
    table = Table(title=" ".join(f"{name}={value}" for name, value in vars(options).items()))
    for column in ("load", "mode", "tokens/s", "of recompute", "tokens computed", "preempted", "swapped"):
        table.add_column(column, justify="left" if column in ("load", "mode") else "right")
    for name in options.load:
        made = loads(options)[name]
        more = options.turns * (options.answer + options.question) if name == "conversations" else options.context // 2
        found: dict[str, list[Outcome]] = {mode: [] for mode in MODES}
        for _ in range(options.rounds):
            for mode, host in MODES.items():
                found[mode].append(run(worker, made(), host, options.context + more, options))
        assert len({repr(sorted(o.answers.items())) for many in found.values() for o in many}) == 1, "answers differ"
        best = {mode: min(many, key=lambda o: o.seconds) for mode, many in found.items()}
        base = best["recompute"].tokens / best["recompute"].seconds
        for mode, one in best.items():
            rate = one.tokens / one.seconds
            table.add_row(name, mode, f"{rate:.1f}", f"{rate / base:.2f}", str(one.computed), str(one.preemptions),
                          str(one.swapped))  # fmt: skip
    console = Console(width=120)
    console.print(table)
    used = psutil.Process().memory_info().rss / GIB
    console.print(f"all answers equal; {used:.1f} GiB resident; load average {psutil.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
