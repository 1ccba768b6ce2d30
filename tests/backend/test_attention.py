"""Paged attention: right, and the same for a token alone, in a batch and however its prompt was cut."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from octavo.backends.base import AttentionMeta, KVCache
from octavo.backends.codes import CodedKVCache
from octavo.backends.cpu.ops import PanelKVCache
from octavo.backends.kv import KV_FORMATS, FullAttention
from tests.backend.conftest import bf16, library
from tests.matrix import sample

HEADS = [(9, 3), (14, 2), (4, 4), (32, 1)]
DIMS = [8, 64, 72, 80, 96, 128, 256]
PAGE_SIZES = [16, 48, 64]
WINDOWS = [None, 1, 20, 150]
FORMS = [None, *dict.fromkeys(KV_FORMATS.values())]
CASES = [(h, d, p, w, f) for h in HEADS for d in DIMS for p in PAGE_SIZES for w in WINDOWS for f in FORMS]


def named(value) -> str:
    return value.name if value in FORMS[1:] else str(value)


@dataclass
class Tokens:
    """One sequence's queries, keys and values [length, heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def tokens(length, heads, kv_heads, dim) -> Tokens:
    return Tokens(bf16(length, heads, dim), bf16(length, kv_heads, dim), bf16(length, kv_heads, dim))


class Paged:
    """Sequences over one cache whose pages are dealt out at random; `step` runs some new tokens of each.

    The cache is in panels of that form, or another one for `num_pages` that `make_cache` makes.
    """

    def __init__(self, ops, sequences, page_size, window, form=None, make_cache=PanelKVCache):
        kv_heads, dim = sequences[0].k.shape[1:]
        needed = [-(-len(s.q) // page_size) for s in sequences]
        self.ops, self.sequences, self.page_size, self.window = ops, sequences, page_size, window
        num_pages = sum(needed) + 3
        self.cache = make_cache(FullAttention(kv_heads, dim), num_pages, page_size, form)
        for data in (self.cache.k, self.cache.v):  # what stale pages hold must not matter: NaN in bf16, fp8, scales
            data.view(torch.uint8).fill_(0xFF)
        if self.cache.k_scale is not None:
            self.cache.k_scale.copy_(torch.linspace(0.5, 2, kv_heads))
            self.cache.v_scale.copy_(torch.linspace(3, 0.3, kv_heads))
        pages = random.sample(range(num_pages), sum(needed))
        self.table = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
        for s, count in enumerate(needed):
            self.table[s, :count] = torch.tensor([pages.pop() for _ in range(count)])
        self.done = [0] * len(sequences)

    def lose_what_is_out_of_reach(self):
        """Pages that no coming token sees go to others, who leave NaN in them."""
        for s, done in enumerate(self.done):
            for page in self.table[s, : max(0, done + 1 - self.window) // self.page_size].tolist():
                self.cache.k[page].view(torch.uint8).fill_(0xFF)
                self.cache.v[page].view(torch.uint8).fill_(0xFF)

    def step(self, counts):
        """Runs counts[s] more tokens of each sequence: [sum, heads, head_dim]."""
        starts = [0]
        slots, parts = [], []
        for s, count in enumerate(counts):
            rows = slice(self.done[s], self.done[s] + count)
            self.done[s] += count
            starts.append(starts[-1] + count)
            positions = torch.arange(rows.start, rows.stop)
            pages = self.table[s, positions // self.page_size].long()
            slots.append(pages * self.page_size + positions % self.page_size)
            sequence = self.sequences[s]
            parts.append((sequence.q[rows], sequence.k[rows], sequence.v[rows]))
        q, k, v = (torch.cat(p) for p in zip(*parts, strict=True))
        meta = AttentionMeta(
            torch.tensor(starts, dtype=torch.int32), torch.tensor(self.done, dtype=torch.int32), self.table,
            torch.cat(slots), self.page_size,
        )  # fmt: skip
        self.ops.write_kv(k, v, self.cache, meta)
        return self.ops.attention(q, self.cache, meta, q.shape[-1] ** -0.5, self.window)


def plain_cache(spec, num_pages, page_size, form) -> KVCache:
    if form is not None:
        return CodedKVCache(spec, num_pages, page_size, form, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    return KVCache(torch.zeros(shape), torch.zeros(shape), page_size)


def whole(ops, sequence, page_size=16, window=None, form=None):
    return Paged(ops, [sequence], page_size, window, form).step([len(sequence.q)])


@pytest.mark.parametrize("case", sample(CASES, 24), ids=lambda case: "-".join(map(named, case)))
def test_equals_the_reference(ops, reference, case):
    (heads, kv_heads), dim, page_size, window, form = case
    lengths = random.sample([1, 2, 15, 16, 17, 50, 129, 300], 3)
    sequences = [tokens(n, heads, kv_heads, dim) for n in lengths]
    got = Paged(ops, sequences, page_size, window, form).step(lengths)
    wide = [Tokens(s.q.float(), s.k, s.v) for s in sequences]
    want = Paged(reference, wide, page_size, window, form, plain_cache).step(lengths)
    torch.testing.assert_close(got.float(), want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("form", FORMS, ids=named)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("chunk", sample([1, 7, 16, 64], 2))
def test_chunks_change_nothing(ops, chunk, window, form):
    heads, kv_heads = random.choice(HEADS)
    sequence = tokens(random.randint(130, 200), heads, kv_heads, random.choice([64, 80]))
    length = len(sequence.q)
    paged = Paged(ops, [sequence], 16, window, form)
    parts = []
    for start in range(0, length, chunk):
        parts.append(paged.step([min(chunk, length - start)]))
        if window is not None:
            paged.lose_what_is_out_of_reach()
    assert torch.equal(torch.cat(parts), whole(ops, sequence, window=window, form=form))


@pytest.mark.parametrize("form", FORMS, ids=named)
def test_batch_changes_nothing(ops, form):
    """Decoding rows and chunks of prompts in one call, against each sequence alone."""
    sequences = [tokens(n, 9, 3, 64) for n in (5, 140, 33, 257, 64)]
    paged = Paged(ops, sequences, 16, None, form)
    got = [[] for _ in sequences]
    while any(left := [len(s.q) - done for s, done in zip(sequences, paged.done, strict=True)]):
        counts = [min(n, random.choice([0, 1, 1, 30, 150])) for n in left]
        if sum(counts) == 0:
            continue
        for parts, part in zip(got, paged.step(counts).split(counts), strict=True):
            parts.append(part)
    for sequence, parts in zip(sequences, got, strict=True):
        assert torch.equal(torch.cat(parts), whole(ops, sequence, form=form))


@pytest.mark.parametrize("form", FORMS, ids=named)
def test_page_size_and_threads_change_nothing(ops, form):
    sequence = tokens(300, 6, 2, 96)
    want = whole(ops, sequence, form=form)
    for threads, page_size in ((1, 16), (3, 32), (2, 48), (5, 128)):
        library().set_threads(threads)
        assert torch.equal(whole(ops, sequence, page_size, form=form), want), (threads, page_size)


@pytest.mark.parametrize("form", FORMS[:3], ids=named)
def test_the_reference_reads_no_page_out_of_reach(reference, form):
    sequence = tokens(100, 4, 2, 32)
    paged = Paged(reference, [sequence], 16, 20, form, plain_cache)
    paged.step([90])
    paged.lose_what_is_out_of_reach()
    want = Paged(reference, [sequence], 16, 20, form, plain_cache).step([100])
    torch.testing.assert_close(paged.step([10]), want[90:])


def test_takes_views_of_a_fused_projection(ops):
    sequence = tokens(20, 6, 2, 64)
    fused = torch.cat((sequence.q, sequence.k, sequence.v), dim=1)
    views = Tokens(fused[:, :6], fused[:, 6:8], fused[:, 8:])
    paged = Paged(ops, [views], 16, None)
    slots = paged.table[0, torch.arange(20) // 16].long() * 16 + torch.arange(20) % 16
    meta = AttentionMeta(
        torch.tensor([0, 20], dtype=torch.int32), torch.tensor([20], dtype=torch.int32), paged.table, slots, 16
    )
    ops.write_kv(views.k, views.v, paged.cache, meta)
    assert torch.equal(ops.attention(views.q, paged.cache, meta, 0.125, None), whole(ops, sequence))
