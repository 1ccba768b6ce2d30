"""The table of penalties against counting from scratch, with drafts, tokens taken back and new sequences."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from octavo.engine.penalties import FIRST_WIDTH, PenaltyTable
from octavo.engine.plan import NewSequence
from octavo.engine.types import SamplingParams
from tests.matrix import SEED

HEIGHT, VOCAB = 6, 500


def introduce(table, rng, row, known):
    repetition = rng.choice([1.0, 1.3])
    sampling = SamplingParams(repetition_penalty=repetition, frequency_penalty=rng.choice([0.0, 0.5]))
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 3, 200]))]
    output = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 5, 100]))]
    asked = table.add(row, NewSequence(0, 0, 0, sampling, prompt, output))
    assert asked == (repetition != 1.0 or sampling.frequency_penalty != 0.0)
    known.pop(row, None)
    if asked:
        known[row] = (sampling, prompt if repetition != 1.0 else [], output)


def read(penalties, place):
    """Token to count, as a kernel would find them for one row of the logits."""
    i = penalties.rows.tolist().index(place)
    span = slice(int(penalties.starts[i]), int(penalties.starts[i] + penalties.lengths[i]))
    tokens, counts = penalties.tokens[span].tolist(), penalties.counts[span].tolist()
    assert len(set(tokens)) == len(tokens)
    return dict(zip(tokens, counts, strict=True)), float(penalties.repetition[i]), float(penalties.frequency[i])


def expected(sampling, prompt, output):
    counts = Counter(output)
    strengths = (np.float32(sampling.repetition_penalty), np.float32(sampling.frequency_penalty))
    return ({token: counts[token] for token in {*prompt, *output}}, *strengths)


def test_the_table_counts_as_one_would_from_scratch(rng):
    table, known = PenaltyTable(HEIGHT, torch.from_numpy), {}
    for row in range(HEIGHT):
        introduce(table, rng, row, known)
    for _ in range(150):
        if rng.random() < 0.1:
            row = rng.randrange(HEIGHT)
            table.remove(row)
            introduce(table, rng, row, known)
        rows = np.array(rng.sample(sorted(known), rng.randint(0, len(known))), np.int64)
        plain = rows[: rng.randint(0, len(rows))]
        drafted = {
            100 + int(row): [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))] for row in rows[len(plain) :]
        }
        for place, drafts in drafted.items():
            counts = table.of[place - 100]
            for token in drafts:
                counts.note(token)
            table.draft(place, place - 100)
            for _ in drafts:
                counts.undo()
        found = table.tensors(np.arange(len(plain)), plain)
        for place, row in enumerate(plain.tolist()):
            assert read(found, place) == expected(*known[row]), f"OCTAVO_SEED={SEED}"
        for place, drafts in drafted.items():
            sampling, prompt, output = known[place - 100]
            assert read(found, place) == expected(sampling, prompt, output + drafts), f"OCTAVO_SEED={SEED}"
        assert (found is None) == (len(rows) == 0)
        for row in rows.tolist():
            for token in rng.choices(range(VOCAB), k=rng.choice([1, 1, 1, 4])):
                table.note(row, token)
                known[row][2].append(token)
            if rng.random() < 0.05:
                table.of[row].undo()
                known[row][2].pop()
                table.reload(row)
    assert any(len(counts) > FIRST_WIDTH for counts in table.of.values()) or not known
