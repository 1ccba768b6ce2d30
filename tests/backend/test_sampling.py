"""The sampler against the reference on the same keys; logprobs."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.backends.base import Edits, Mask, Penalties, SamplingTensors
from octavo.backends.reference import Ops, exponential_noise, filter_logits
from octavo.engine.constraints import bitmask
from tests.backend.conftest import library
from tests.matrix import sample

VOCABS = [1, 2, 15, 16, 33, 4096, 4097, 10000]


def sampling(rows, temperature=None, **fields):
    temperature = torch.rand(rows) * 2 + 0.1 if temperature is None else temperature
    values = {
        "top_k": torch.zeros(rows, dtype=torch.int32), "top_p": torch.ones(rows), "min_p": torch.zeros(rows),
        "keys": torch.randint(-(2**63), 2**63 - 1, (rows,)), "needs_filter": False, "penalties": None,
    } | fields  # fmt: skip
    return SamplingTensors(temperature, all_greedy=bool((temperature == 0).all()), **values)


def noise_of(ops, keys, vocab):
    out = torch.empty(len(keys), vocab)
    ops._kernels.exponential_noise(keys.data_ptr(), len(keys), vocab, out.data_ptr())
    return out


def check_race(got, logits, params):
    """Equal to the reference, or within 1e-5 of winning the reference's race."""
    truth = Ops().sample(logits.clone(), params)
    for r in (got != truth).nonzero().flatten().tolist():
        scaled = logits[r].double() / params.temperature[r].double()
        race = scaled.softmax(-1) / exponential_noise(params.keys[r : r + 1], len(scaled))[0].double()
        assert race[got[r]] >= race[truth[r]] * (1 - 1e-5), (r, got[r], truth[r])


@pytest.mark.parametrize("vocab", VOCABS)
def test_noise_equals_the_reference(ops, vocab):
    keys = torch.randint(-(2**63), 2**63 - 1, (3,))
    torch.testing.assert_close(noise_of(ops, keys, vocab), exponential_noise(keys, vocab), atol=0, rtol=4e-7)


def test_noise_of_the_smallest_hash(ops):
    """Keys whose first hash has upper bits 0, 1 and all ones: where cancellation would hurt most."""
    keys = torch.tensor([_key_of_hash(bits << 32 | 7) for bits in (0, 1, 2**30 - 1, 2**30, 2**31, 2**32 - 1)])
    torch.testing.assert_close(noise_of(ops, keys, 1), exponential_noise(keys, 1), atol=0, rtol=4e-7)


def _key_of_hash(value):
    """The inverse of the reference's hash, for token 0."""
    mask = (1 << 64) - 1
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        value = (value ^ value >> 33) * pow(factor, -1, 1 << 64) & mask
    value = (value ^ value >> 33) - 0x9E3779B97F4A7C15 & mask
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize("vocab", VOCABS)
def test_sample_equals_the_reference(ops, vocab):
    logits = torch.randn(12, vocab) * 4
    temperature = torch.where(torch.rand(12) < 0.3, 0.0, torch.rand(12) * 2 + 0.05)
    params = sampling(12, temperature)
    got = ops.sample(logits.clone(), params)
    assert got.dtype is torch.int64
    check_race(got, logits, params)
    greedy = temperature == 0
    assert torch.equal(got[greedy], logits.argmax(-1)[greedy])


FILTERS = [
    (vocab, spread, k, p, m)
    for vocab in (1, 17, 500, 6000)
    for spread in (0.0, 0.3, 3.0, 30.0)
    for k in (0, 1, 7, 400)
    for p in (1.0, 0.95, 0.5, 1e-6, 0.9999999)
    for m in (0.0, 0.05, 1.0)
    if (k, p, m) != (0, 1.0, 0.0)
]


def filters(k, p, m):
    one = {"top_k": torch.tensor([k], dtype=torch.int32), "top_p": torch.tensor([p]), "min_p": torch.tensor([m])}
    return sampling(1, needs_filter=True, **one)


@pytest.mark.parametrize("case", sample(FILTERS, 40), ids=str)
def test_filters_keep_what_the_reference_keeps(ops, case):
    vocab, spread, *limits = case
    logits, params = torch.randn(1, vocab) * spread, filters(*limits)
    want = filter_logits(logits / params.temperature, params)[0]
    got = logits.clone()
    assert ops._filter(got, params).tolist() == [1.0]
    kept, truth = got[0].isfinite(), want.isfinite()
    assert torch.equal(got[0][kept & truth], want[kept & truth])
    assert kept[logits[0].argmax()]
    scaled = (logits / params.temperature)[0].double()
    if limits[0]:
        left = scaled.sort(descending=True, stable=True).indices[: limits[0]]
        scaled = torch.full_like(scaled, -torch.inf).index_copy(0, left, scaled[left])
    probs = scaled.softmax(-1)
    for token in (kept != truth).nonzero().flatten():  # only where a limit is met but for rounding
        before = probs[(scaled > scaled[token]) | ((scaled == scaled[token]) & (torch.arange(vocab) < token))].sum()
        assert abs(before - limits[1]) < 1e-5 or abs(probs[token] / probs.max() - limits[2]) < 1e-5


def test_rows_with_and_without_filters(ops, reference):
    rows, vocab = 24, 500
    logits = torch.randn(rows, vocab) * 3
    params = sampling(
        rows, torch.where(torch.rand(rows) < 0.2, 0.0, torch.rand(rows) + 0.3),
        top_k=torch.tensor([random.choice([0, 1, 5, 40]) for _ in range(rows)], dtype=torch.int32),
        top_p=torch.tensor([random.choice([1.0, 0.9, 0.1]) for _ in range(rows)]),
        min_p=torch.tensor([random.choice([0.0, 0.05]) for _ in range(rows)]), needs_filter=True,
    )  # fmt: skip
    before = params.temperature.clone()
    assert torch.equal(ops.sample(logits.clone(), params), reference.sample(logits.clone(), params))
    assert torch.equal(params.temperature, before)


def test_penalties(ops, reference):
    rows, vocab, width = 5, 50, 20
    logits = torch.randn(rows, vocab)
    touched = torch.tensor(random.sample(range(rows), 3))
    tokens = torch.cat([torch.randperm(vocab)[:width] for _ in range(rows)]).int()
    p = Penalties(
        touched, torch.randperm(rows)[:3] * width, torch.randint(0, width + 1, (3,)), 0.5 + torch.rand(3),
        torch.randn(3), torch.randn(3), tokens, torch.randint(0, 3, (rows * width,)).float(),
    )  # fmt: skip
    expected = logits.clone()
    for i, row in enumerate(touched.tolist()):
        for at in range(int(p.starts[i]), int(p.starts[i] + p.lengths[i])):
            value, count = logits[row, tokens[at]], p.counts[at]
            value = value / p.repetition[i] if value > 0 else value * p.repetition[i]
            expected[row, tokens[at]] = value - p.frequency[i] * count - p.presence[i] * (count > 0)
    for each in (ops, reference):
        changed = logits.clone()
        each.apply_penalties(changed, p)
        assert torch.equal(changed, expected)
    params = sampling(rows, torch.zeros(rows), penalties=p)
    assert torch.equal(ops.sample(logits.clone(), params), expected.argmax(-1))


def test_a_row_is_the_same_alone_and_with_any_threads(ops):
    logits, params = torch.randn(9, 9000) * 2, sampling(9)
    want = ops.sample(logits.clone(), params)
    for threads in (1, 2, 3):
        library().set_threads(threads)
        assert torch.equal(ops.sample(logits.clone(), params), want)
    for r in range(9):
        one = sampling(1, params.temperature[r : r + 1], keys=params.keys[r : r + 1])
        assert torch.equal(ops.sample(logits[r : r + 1].clone(), one), want[r : r + 1])


def test_draws_follow_the_distribution(ops):
    logits = torch.tensor([0.0, 1.0, 2.0, float("-inf"), 0.5]).repeat(20000, 1)
    counts = torch.bincount(ops.sample(logits.clone(), sampling(20000, torch.ones(20000))), minlength=5)
    want = logits[0].softmax(-1) * 20000
    assert counts[3] == 0
    assert ((counts - want).abs() < 6 * want.clamp(min=1).sqrt()).all(), (counts, want)


@pytest.mark.parametrize("vocab", sample(VOCABS, 5))
def test_logprobs(ops, reference, vocab):
    top = random.randint(0, min(20, vocab))
    logits = torch.randn(7, vocab) * 5
    ids = torch.randint(0, vocab, (7,))
    chosen, rank, values, best = ops.logprobs(logits, ids, top)
    scores, mine = logits.double().log_softmax(-1), logits.gather(1, ids.unsqueeze(1))
    torch.testing.assert_close(chosen.double(), scores.gather(1, ids.unsqueeze(1)).squeeze(1), atol=1e-5, rtol=1e-6)
    assert torch.equal(rank, (logits > mine).sum(-1) + 1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    assert torch.equal(best, order)
    torch.testing.assert_close(values.double(), scores.gather(1, order), atol=1e-5, rtol=1e-6)
    for got, want in zip((chosen, rank, values, best), reference.logprobs(logits, ids, top), strict=True):
        assert got.dtype is want.dtype and got.shape == want.shape


def test_logprobs_of_equal_logits(ops):
    """Equals are reported by lower id, and a token's rank counts only what is above it."""
    chosen, rank, values, ids = ops.logprobs(torch.zeros(1, 40), torch.tensor([30]), 5)
    assert rank.tolist() == [1] and ids.tolist() == [[0, 1, 2, 3, 4]]
    torch.testing.assert_close(values, torch.full((1, 5), chosen.item()))


@pytest.mark.parametrize("vocab", sample(VOCABS, 5))
def test_logprobs_of_everything(ops, reference, vocab):
    """In one order by themselves, and as many of the best as there are; the same bits as the few best have."""
    logits = torch.randn(3, vocab) * 5
    ids = torch.randint(0, vocab, (3,))
    scores = ops.log_softmax(logits)
    torch.testing.assert_close(scores, reference.log_softmax(logits), atol=1e-5, rtol=1e-6)
    few = min(20, vocab)
    chosen, rank, values, best = ops.logprobs(logits, ids, vocab)
    for got, want in zip((chosen, rank), ops.logprobs(logits, ids, few)[:2], strict=True):
        assert torch.equal(got, want)
    assert torch.equal(values[:, :few], ops.logprobs(logits, ids, few)[2])
    assert torch.equal(best, logits.sort(dim=-1, descending=True, stable=True).indices)
    assert torch.equal(values, scores.gather(1, best))
    assert torch.equal(scores.gather(1, ids.unsqueeze(1)).squeeze(1), chosen)


@pytest.mark.parametrize("vocab", sample(VOCABS, 5))
def test_masks_and_edits(ops, reference, vocab):
    rows = 5
    logits = torch.randn(rows, vocab)
    chosen = torch.tensor(random.sample(range(rows), 3))
    allowed = torch.rand(3, vocab) < 0.5
    bits = torch.stack([torch.from_numpy(bitmask(row.nonzero().flatten().tolist(), vocab)) for row in allowed])
    assert bits.shape == (3, -(-vocab // 32))
    banned = torch.randint(0, rows * vocab, (10,))
    biased = torch.randperm(rows * vocab)[: min(7, rows * vocab)]
    bias = torch.randn(len(biased))
    params = sampling(rows, torch.zeros(rows), mask=Mask(chosen, bits), edits=Edits(banned, biased, bias))
    want = logits.clone()
    want[chosen] = want[chosen].masked_fill(~allowed, -torch.inf)
    want.view(-1)[banned] = -torch.inf
    want.view(-1)[biased] += bias
    for each in (ops, reference):
        assert torch.equal(each.edit_logits(logits.clone(), params), want)
        assert torch.equal(each.sample(logits.clone(), params), want.argmax(-1))
