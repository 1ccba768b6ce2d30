"""What structured output costs in a step, beside the model and after it. python -m bench.grammar_masks [MODEL]

All rows follow a schema, their tokens drawn evenly from what it allows. `beside`: feeding the matchers and computing
the masks, which a step waits for only where it takes longer than the model; `after`: applying them to the logits.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import numpy as np
import torch

from octavo.backends.base import open_device
from octavo.engine.grammar import Bits, Compiler, Masks
from octavo.engine.plan import Chunk, NewSequence
from octavo.engine.types import SamplingParams, StructuredOutputsParams
from octavo.hub.resolve import resolve_model
from octavo.text.tokenizer import load_tokenizer

ROWS = (1, 16, 64, 256)
STEPS = 60
TEXT = {"type": "string", "maxLength": 200}
SCHEMAS = {
    "person": {
        "type": "object", "properties": {"name": TEXT, "age": {"type": "integer"}, "city": TEXT},
        "required": ["name", "age", "city"], "additionalProperties": False,
    },
    "orders": {
        "type": "array", "minItems": 20, "items": {
            "type": "object", "properties": {
                "id": {"type": "integer", "minimum": 1000}, "when": {"type": "string", "format": "date-time"},
                "state": {"enum": ["new", "paid", "sent", "lost"]}, "tags": {"type": "array", "items": TEXT},
            },
        },
    },
    "any JSON object": {"type": "object"},
}  # fmt: skip


def drawn(bits: Bits, rng: random.Random) -> int:
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return int(allowed[rng.randrange(len(allowed))])


def medians_us(compiler: Compiler, schema: dict, rows: int, threads: int) -> tuple[float, float]:
    """(beside, after) of a step."""
    rng, masks, ops = random.Random(1), Masks(compiler), open_device("auto", 0, threads).ops
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    chunk = Chunk(0, 0, [0], (0,), ([],), True)
    logits = torch.randn(rows, compiler.vocab_size)
    beside: list[float] = []
    after: list[float] = []
    for row in range(rows):
        masks.add(row, NewSequence(row, 0, 0, asked, [0], []))
    for _ in range(STEPS):
        begin = time.perf_counter()
        masks.begin([(chunk, row) for row in range(rows)])
        found = masks.finish()
        ready = time.perf_counter()
        ops.apply_bitmask(logits, torch.arange(rows), torch.from_numpy(np.stack(list(found.values()))))
        after.append(time.perf_counter() - ready)
        beside.append(ready - begin)
        for row, bits in found.items():
            if (token := drawn(bits, rng)) in compiler.eos_token_ids:
                masks.add(row, NewSequence(row, 0, 0, asked, [0], []))
            else:
                masks.note(row, [token])
    return statistics.median(beside) * 1e6, statistics.median(after) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model(arguments.model))
    eos = (tokenizer.eos_token_id or 0,)
    begin = time.perf_counter()
    compiler = Compiler(lambda: tokenizer, tokenizer.vocab_size, eos)
    compiler.begin(StructuredOutputsParams(json_object=True)).result()
    print(f"{tokenizer.vocab_size} tokens, read in {time.perf_counter() - begin:.2f} s")
    for name, schema in SCHEMAS.items():
        for rows in ROWS:
            beside, after = medians_us(compiler, schema, rows, arguments.threads)
            print(f"{name:16} {rows:4} rows: beside {beside:7.0f} us, after {after:7.0f} us")


if __name__ == "__main__":
    main()
