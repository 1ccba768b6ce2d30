"""The sampler against a slow one in plain Python: every parameter, drafts, lost steps, rows that are built again."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from octavo.backends.base import open_device
from octavo.engine.noise import noise_key
from octavo.engine.plan import Chunk, NewSequence
from octavo.engine.sampler import Sampler
from octavo.engine.types import SamplingParams
from tests.engine.test_runner import exponential
from tests.matrix import SEED, sample

VOCAB, HEIGHT, EOS = 70, 12, (2, 3)
START, END = 10, 11
SPECIAL = (*EOS, START, END)
FEATURES = {
    "plain": lambda rng: {},
    "bias": lambda rng: {
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(rng.randint(1, 9))}
    },
    "allowed": lambda rng: {"allowed_token_ids": rng.sample(range(VOCAB), rng.randint(3, 40))},
    "bad words": lambda rng: {"bad_word_ids": bad_words(rng)},
    "minimum": lambda rng: {"min_tokens": rng.randint(1, 15), "stop_token_ids": rng.sample(range(VOCAB), 30)},
    "thinking": lambda rng: {"thinking_token_budget": rng.randint(0, 6), "thinking_marks": (START, END)},
    "repetition": lambda rng: {"repetition_penalty": rng.uniform(0.5, 2)},
    "frequency": lambda rng: {"frequency_penalty": rng.uniform(-2, 2), "presence_penalty": rng.uniform(-2, 2)},
}


def bad_words(rng):
    """Over few tokens, so that they come about."""
    return tuple(tuple(rng.choices(range(12), k=rng.choice([1, 2, 2, 3]))) for _ in range(rng.randint(1, 12)))


@dataclass
class Row:
    """A sequence, its true history, and what it may be asked to report."""

    sampling: SamplingParams
    prompt: list[int]
    seed: int
    choice: int
    output: list[int] = field(default_factory=list)

    def introduction(self) -> NewSequence:
        return NewSequence(0, self.choice, self.seed, self.sampling, self.prompt, list(self.output))


def fresh_row(rng, names):
    fields = {"temperature": rng.choice([0.0, 0.0, 1.0]), "max_tokens": 1000}
    for name in names:
        fields |= FEATURES[name](rng)
    if rng.random() < 0.3:
        fields["top_k"] = rng.randint(1, 8)
    if rng.random() < 0.4:
        fields |= rng.choice(
            [{"logprobs": rng.choice([0, 3])}, {"logprob_token_ids": rng.sample(range(VOCAB), 4)}, {"logprobs": -1}]
        )
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
    return Row(SamplingParams(**fields), prompt, rng.randrange(1 << 60), rng.randrange(4))


def changed_logits(row, logits, output):
    """What the parameters leave of `logits` after `output`: list of floats, and the token that is forced."""
    p, x = row.sampling, list(logits)
    history = row.prompt + output
    if p.thinking_token_budget is not None:
        marks = [i for i, token in enumerate(history) if token in (START, END)]
        if marks and history[marks[-1]] == START and len(history) - marks[-1] - 1 >= p.thinking_token_budget:
            return x, END
    for token in range(VOCAB):
        out = p.allowed_token_ids is not None and token not in p.allowed_token_ids
        out |= len(output) < p.min_tokens and (token in EOS or token in p.stop_token_ids)
        for word in p.bad_word_ids:
            before = list(word[:-1])
            out |= word[-1] == token and (not before or output[-len(before) :] == before)
        x[token] = -math.inf if out else x[token] + (p.logit_bias or {}).get(token, 0.0)
    for token in set(history):
        if token in history:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        if token in output:
            x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return x, None


def choices(row, logits, output):
    """The tokens that may be chosen but for rounding, the best first; none where all are excluded."""
    x, forced = changed_logits(row, logits, output)
    if forced is not None:
        return [forced]
    if max(x) == -math.inf:
        return []
    order = sorted(range(VOCAB), key=lambda t: (-x[t], t))
    if row.sampling.greedy:
        return [t for t in order if x[order[0]] - x[t] < 1e-4]
    kept = order[: row.sampling.top_k or VOCAB]
    key = noise_key(row.seed, row.choice, len(row.prompt) + len(output))
    race = {t: x[t] / row.sampling.temperature - np.log(exponential(key, t)) for t in kept if x[t] > -math.inf}
    best = max(race.values())
    return [t for t in sorted(race, key=lambda t: -race[t]) if best - race[t] < 1e-3]


def check_logprobs(row, logits, got, note):
    p = row.sampling
    if p.logprobs is None and p.logprob_token_ids is None:
        assert got.logprobs is None, note
        return
    scores = torch.tensor(logits).double().log_softmax(-1)
    order = sorted(range(VOCAB), key=lambda t: (-logits[t], t))
    best = {None: [], -1: order}.get(p.logprobs, order[: max(p.logprobs or 0, 0)])
    others = list(p.logprob_token_ids) if p.logprob_token_ids is not None else best
    assert got.logprobs.token_ids == [got.token_id, *others], note
    np.testing.assert_allclose(got.logprobs.logprobs, scores[got.logprobs.token_ids], atol=1e-4, err_msg=note)
    assert got.logprobs.rank == 1 + sum(value > logits[got.token_id] for value in logits), note


class Checked:
    """A sampler whose every answer is compared with the slow one's."""

    def __init__(self, device, rows):
        self.sampler = Sampler(HEIGHT, VOCAB, device, EOS)
        self.rows = rows
        for index, row in enumerate(rows):
            self.sampler.add(index, row.introduction())

    def step(self, rng, some, num_drafts, lost):
        """One step of the rows `some`; `lost`: its results are, and it is done again."""
        chunks, logits, drafts = [], [], []
        for index in some:
            row = self.rows[index]
            mine, guesses = [], []
            for place in range(num_drafts.get(index, 0) + 1):
                mine.append([rng.gauss(0, 3) + (4 if t in SPECIAL else 0) for t in range(VOCAB)])
                right = choices(row, mine[-1], row.output + guesses)
                if place < num_drafts.get(index, 0):
                    guesses.append(right[0] if right and rng.random() < 0.7 else rng.randrange(VOCAB))
            known = row.prompt + row.output
            tail = rng.randint(1, len(known)) if rng.random() < 0.2 else 1
            ids = known[-tail:] + guesses
            chunks.append(Chunk(index, len(known) - tail, ids, (), (), True, num_drafts=len(guesses)))
            logits += mine
            drafts.append(guesses)
        tensor = torch.tensor(logits, dtype=torch.float32)
        rows = np.array(some, np.int64)
        answers = self.sampler.sample(tensor.clone(), chunks, rows)
        if lost:
            assert self.sampler.sample(tensor.clone(), chunks, rows) == answers, f"OCTAVO_SEED={SEED}"
        first = 0
        for index, guesses, answer in zip(some, drafts, answers, strict=True):
            self._compare(index, guesses, answer, tensor[first : first + len(guesses) + 1].tolist())
            first += len(guesses) + 1

    def _compare(self, index, guesses, answer, logits):
        row = self.rows[index]
        note = f"OCTAVO_SEED={SEED}, {row.sampling}, after {row.prompt} {row.output}, drafts {guesses}"
        expected = 0
        for place, one in enumerate(answer):
            right = choices(row, logits[place], row.output)
            assert one.token_id in right, f"{note}: {one.token_id}, not {right}"
            check_logprobs(row, logits[place], one, note)
            row.output.append(one.token_id)
            expected = place + 1
            if place < len(guesses) and guesses[place] != one.token_id:
                break
        else:
            if len(answer) <= len(guesses):
                assert choices(row, logits[len(answer)], row.output) == [], f"{note}: it ends without a reason"
        assert len(answer) == expected, note


@pytest.mark.parametrize("device_name", ["reference", "cpu"])
@pytest.mark.parametrize("mixed", [False, True])
def test_every_parameter_against_a_slow_sampler(device_name, mixed):
    rng = random.Random(f"{SEED}/{device_name}/{mixed}")
    names = sample(FEATURES, 8)
    rows = [
        fresh_row(rng, rng.sample(names, rng.randint(2, 5)) if mixed else [names[i % len(names)]])
        for i in range(HEIGHT)
    ]
    checked = Checked(open_device(device_name, threads=1), rows)
    for _ in range(40):
        some = rng.sample(range(HEIGHT), rng.randint(1, HEIGHT))
        num_drafts = {index: rng.randint(0, 3) for index in some} if rng.random() < 0.3 else {}
        checked.step(rng, some, num_drafts, lost=rng.random() < 0.1)
        for index in range(HEIGHT):
            if rng.random() < 0.03:  # preempted, or ended and another in its place
                checked.sampler.remove(index)
                if rng.random() < 0.3:
                    checked.rows[index] = fresh_row(rng, rng.sample(names, 2))
                checked.sampler.add(index, checked.rows[index].introduction())


@pytest.mark.parametrize("device_name", ["reference", "cpu"])
def test_where_everything_is_excluded_nothing_is_sampled(device_name):
    device = open_device(device_name, threads=1)
    sampler = Sampler(4, VOCAB, device, EOS)
    asked = [
        {"allowed_token_ids": [5], "bad_word_ids": ((5,),)}, {"allowed_token_ids": [2], "min_tokens": 1},
        {"allowed_token_ids": [5], "bad_word_ids": ((5,),), "temperature": 0.0}, {"allowed_token_ids": [5]},
    ]  # fmt: skip
    for row, fields in enumerate(asked):
        sampler.add(row, NewSequence(row, 0, 1, SamplingParams(**fields), [1], []))
    chunks = [Chunk(row, 0, [1], (), (), True) for row in range(4)]
    found = sampler.sample(torch.randn(4, VOCAB), chunks, np.arange(4))
    assert [[one.token_id for one in tokens] for tokens in found] == [[], [], [], [5]]
