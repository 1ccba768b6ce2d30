"""What guessing ahead by prompt lookup gains on text that repeats itself: python -m bench.speculation [MODEL]

Two engines, one that guesses and one that does not, answer the same prompts in turns; their answers must be equal. Each
prompt holds a list of random sentences twice and the beginning of a third time, so that a model mostly copies; with
--fresh the list stands there once, and there is little to copy: what guessing costs where it fails.
"""

from __future__ import annotations

import argparse
import random
import statistics

from rich.console import Console
from rich.table import Table

from bench.interleave import interleave
from octavo import LLM, SamplingParams

SUBJECTS = ["the old miller", "a grey cat", "my neighbour", "the postman", "a young doctor", "her sister"]
VERBS = ["painted", "lost", "found", "sold", "carried home", "forgot", "repaired", "admired"]
OBJECTS = ["a wooden boat", "three letters", "the blue lamp", "an old map", "the garden gate", "a silver spoon"]
PLACES = ["near the river", "in the attic", "on Monday", "before noon", "at the station", "after the storm"]


def prompt(fresh: bool) -> str:
    sentences = [
        f"{i}. {random.choice(SUBJECTS)} {random.choice(VERBS)} {random.choice(OBJECTS)} {random.choice(PLACES)}."
        for i in range(1, 16)
    ]
    text = "\n".join(sentences)
    return f"{text}\n\nA story about this:\n" if fresh else f"{text}\n\n{text}\n\n{sentences[0]}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--guesses", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    asked = parser.parse_args()
    random.seed(asked.seed)
    speculation = {
        "method": "ngram", "num_speculative_tokens": asked.guesses, "prompt_lookup_min": 2, "prompt_lookup_max": 5,
        "disable_by_batch_size": max(asked.batches),
    }  # fmt: skip
    settings = {"max_model_len": 2048, "enable_prefix_caching": True}
    console = Console()
    console.print(f"{asked.model}, {asked.tokens} tokens an answer, up to {asked.guesses} guesses, --seed {asked.seed}")
    table = Table("sequences", "plain tokens/s", "guessing tokens/s", "ratio", "answers")
    with (
        LLM(asked.model, **settings) as plain,
        LLM(asked.model, speculative_config=speculation, **settings) as guessing,
    ):
        for batch in asked.batches:
            table.add_row(*row(plain, guessing, [prompt(asked.fresh) for _ in range(batch)], asked))
    console.print(table)


def row(plain: LLM, guessing: LLM, prompts: list[str], asked: argparse.Namespace) -> list[str]:
    """Prompts are in the prefix cache after the first turn, so decoding is what is timed."""
    params = SamplingParams(max_tokens=asked.tokens, temperature=asked.temperature, seed=7, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    same = answers(plain) == answers(guessing)
    times = interleave({"plain": lambda: answers(plain), "guessing": lambda: answers(guessing)}, asked.rounds)
    speed = {name: len(prompts) * asked.tokens / statistics.median(seconds) for name, seconds in times.items()}
    ratio = statistics.median(p / g for p, g in zip(times["plain"], times["guessing"], strict=True))
    return [
        str(len(prompts)), f"{speed['plain']:.1f}", f"{speed['guessing']:.1f}", f"{ratio:.2f}",
        "equal" if same else "DIFFERENT",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
