"""A small engine that runs a decoder over a paged KV cache in an order drawn by chance."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from octavo.backends.base import AdapterRows, AttentionMeta, Device, ForwardBatch
from octavo.backends.reference import ReferenceDevice
from octavo.models.decoder import Decoder

PAGE = 4


def reference_device() -> ReferenceDevice:
    device = ReferenceDevice()
    device.open(0, 1)
    return device


def random_prompts(rng: random.Random, vocab_size: int, longest: int = 40) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(3)]


@torch.inference_mode()
def paged_logits(
    decoder: Decoder, device: Device, prompts: list[list[int]], rng: random.Random, adapters: tuple[int, ...] = ()
) -> list[Tensor]:
    """Logits of every position; `adapters` has the number of each prompt's adapter, 0 for none.

    Each step takes a random number of tokens of a random set of the sequences, in random order; blocks are scattered
    over the cache, differently in each KV group.
    """
    pages = [-(-len(prompt) // PAGE) for prompt in prompts]
    total = sum(pages) + 3
    specs = {layer: group.spec for group in decoder.kv_groups for layer in group.layers}
    kv = [device.allocate_kv(specs[i], total, PAGE, torch.float32) for i in range(len(specs))]
    tables = []
    for _ in decoder.kv_groups:
        free = rng.sample(range(total), total)
        tables.append([[free.pop() for _ in range(count)] for count in pages])
    done = [0] * len(prompts)
    rows: list[list[Tensor]] = [[] for _ in prompts]
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        unfinished = [s for s in range(len(prompts)) if done[s] < len(prompts[s])]
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        spans = [(s, done[s], min(len(prompts[s]), done[s] + rng.choice((1, 1, 3, 17)))) for s in chosen]
        hidden = decoder.forward(_batch(spans, prompts, tables, adapters), kv)
        logits = decoder.logits(hidden)
        assert logits.dtype == torch.float32
        for (s, start, stop), part in zip(spans, logits.split([b - a for _, a, b in spans]), strict=True):
            assert start == done[s]
            rows[s].append(part)
            done[s] = stop
    return [torch.cat(parts) for parts in rows]


def _batch(
    spans: list[tuple[int, int, int]],
    prompts: list[list[int]],
    tables: list[list[list[int]]],
    adapters: tuple[int, ...],
) -> ForwardBatch:
    positions = [p for _, start, stop in spans for p in range(start, stop)]
    tokens = [prompts[s][p] for s, start, stop in spans for p in range(start, stop)]
    query_start = np.cumsum([0] + [stop - start for _, start, stop in spans])
    metas = []
    for table in tables:
        width = max(len(table[s]) for s, _, _ in spans)
        padded = [table[s] + [0] * (width - len(table[s])) for s, _, _ in spans]
        slots = [table[s][p // PAGE] * PAGE + p % PAGE for s, start, stop in spans for p in range(start, stop)]
        metas.append(
            AttentionMeta(
                torch.tensor(query_start, dtype=torch.int32),
                torch.tensor([stop for _, _, stop in spans], dtype=torch.int32),
                torch.tensor(padded, dtype=torch.int32),
                torch.tensor(slots),
                PAGE,
            )
        )
    of_token = torch.tensor([adapters[s] for s, start, stop in spans for _ in range(start, stop)] if adapters else [])
    rows = tuple(
        AdapterRows(n, (of_token == n).nonzero().flatten()) for n in sorted(set(adapters)) if n in of_token and n
    )
    return ForwardBatch(torch.tensor(tokens), torch.tensor(positions), tuple(metas), rows)
