"""Every operation in plain torch: the truth that other backends are compared with, and what runs without them.

Legible and exact rather than fast. Accumulations of norms, softmax and sampling are in float32.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.backends.base import AttentionMeta, Device, Edits, KVCache, Penalties, SamplingTensors
from octavo.backends.codes import CodedKVCache
from octavo.backends.kv import KVFormat, KVSpec, LatentAttention

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class PackedLinear:
    """A weight in a backend's own layout. `data` is the backend's business."""

    in_features: int
    out_features: int
    data: tuple[Tensor, ...]
    bias: Tensor | None


class Ops:
    """The operations a model is made of. Results are new tensors unless said otherwise.

    Inputs are contiguous, but for q, k, v and rope's x [T, heads, head_dim], whose tokens may lie any distance apart:
    they are views of one fused projection, and copying them apart would cost as much as the rotation.
    """

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Rows of `table` [V, H] for `token_ids` [T]: [T, H]."""
        return F.embedding(token_ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension (arXiv:1910.07467); [T, H] to [T, H]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). May write the sum into `residual`."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Rotary embedding, half-split form (arXiv:2104.09864), of the first `table.shape[1]` channels of each head.

        x: [T, heads, head_dim]; positions: int64 [T]; table: float32 [context, rotary_dim], cosines then sines of
        each of the rotary_dim / 2 frequencies. May rotate in place; returns the rotated tensor.
        """
        half = table.shape[1] // 2
        cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
        a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
        return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), dim=-1)

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        """act(gate) * up for `gate_up` [T, 2 * I], gate first: [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def pack_linear(self, weight: Tensor, bias: Tensor | None, lasting: bool = True) -> PackedLinear:
        """Takes `weight` [N, K] and `bias` [N]; the caller forgets them.

        One that is not `lasting` gives its memory back when it is dropped; others may share theirs until the end.
        """
        return PackedLinear(weight.shape[1], weight.shape[0], (weight,), bias)

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K] to x @ weight.T + bias [T, N], in `out_dtype` (x's when None; else float32, as logits need).

        With float32 asked for, the sum is not rounded to x's dtype on the way.
        """
        if out_dtype in (None, x.dtype):
            return F.linear(x, packed.data[0], packed.bias)
        return F.linear(x.float(), packed.data[0].float(), None if packed.bias is None else packed.bias.float())

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, meta: AttentionMeta) -> None:
        """Writes k and v [T, kv_heads, head_dim] into the slots of `meta`."""
        if isinstance(cache, CodedKVCache):
            cache.keys.write(k, meta.slots)
            cache.values.write(v, meta.slots)
            return
        cache.k.flatten(0, 1)[meta.slots] = k.to(cache.k.dtype)
        cache.v.flatten(0, 1)[meta.slots] = v.to(cache.v.dtype)

    def attention(self, q: Tensor, cache: KVCache, meta: AttentionMeta, scale: float, window: int | None) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over each sequence's pages: [T, heads, head_dim].

        Query heads h of one kv head are consecutive. With `window`, a token sees itself and the window - 1 before it.
        Keys and values are those that the cache holds, also of the tokens that this step has written: a prompt that is
        cut into chunks sees no others. What no token sees may be anything, NaN too.
        """
        out = q.new_empty(q.shape)
        starts, lens = meta.query_start.tolist(), meta.seq_lens.tolist()
        for s, seq_len in enumerate(lens):
            rows = slice(starts[s], starts[s + 1])
            oldest = 0 if window is None else max(0, seq_len - (starts[s + 1] - starts[s]) + 1 - window)
            first = oldest // meta.page_size  # pages before it may belong to others by now
            blocks = meta.block_table[s, first : -(-seq_len // meta.page_size)].long()
            seen = slice(0, seq_len - first * meta.page_size)
            k, v = (t[seen] for t in _read(cache, blocks))
            out[rows] = _attend(q[rows], k, v, scale, window)
        return out

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """Token ids int64 [R] for contiguous float32 `logits` [R, V], which may be overwritten.

        `edit_logits`, then temperature, then top-k, top-p and min-p, then argmax of probability over exponential noise
        (the Gumbel-max trick as a race), so that one key a row decides, whatever else is in the batch. A row in which
        nothing is allowed gives some token whose place in `logits` is then -inf.
        """
        logits = self.edit_logits(logits, params)
        greedy = logits.argmax(-1)
        if params.all_greedy:
            return greedy
        is_greedy = params.temperature == 0
        scaled = logits / torch.where(is_greedy, 1.0, params.temperature).unsqueeze(1)
        if params.needs_filter:
            scaled = filter_logits(scaled, params)
        race = scaled.softmax(-1) / exponential_noise(params.keys, logits.shape[1])
        return torch.where(is_greedy, greedy, race.argmax(-1))

    def edit_logits(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """What changes single tokens, in place and in vLLM's order: mask, bans, biases, penalties."""
        if params.mask is not None:
            self.apply_bitmask(logits, params.mask.rows, params.mask.bits)
        if params.edits is not None:
            apply_edits(logits, params.edits)
        if params.penalties is not None:
            self.apply_penalties(logits, params.penalties)
        return logits

    def apply_penalties(self, logits: Tensor, p: Penalties) -> None:
        """Repetition (arXiv:1909.05858: of prompt and output), frequency and presence penalties (of output), in place:
        there are few places, and the logits of a full batch would take milliseconds to copy."""
        row = torch.arange(len(p.rows), device=p.rows.device).repeat_interleave(p.lengths)
        firsts = p.lengths.cumsum(0) - p.lengths
        at = torch.arange(len(row), device=row.device) + (p.starts - firsts)[row]
        index, count = p.rows[row] * logits.shape[1] + p.tokens[at], p.counts[at]
        flat = logits.view(-1)
        old = flat[index]
        new = torch.where(old > 0, old / p.repetition[row], old * p.repetition[row])
        flat[index] = new - p.frequency[row] * count - p.presence[row] * (count > 0)

    def apply_bitmask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Sets to -inf, in place, what is not allowed: tokens whose bit in `bits` int32 [M, ceil(V / 32)] is 0, in the
        `rows` int64 [M] of `logits` [R, V]. Bit t % 32 of word t // 32 is token t's."""
        place = torch.arange(32, dtype=torch.int32, device=bits.device)
        allowed = (bits.unsqueeze(-1) >> place & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Logprobs of all tokens, float32 [R, V], equal to those that `logprobs` gives."""
        return logits.float().log_softmax(-1)

    def logprobs(self, logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of raw `logits` [R, V]: logprob [R] and rank [R] (1 is best) of `token_ids`, and the `top` best as
        (values [R, top], ids [R, top])."""
        scores = logits.float().log_softmax(-1)
        chosen = scores.gather(1, token_ids.unsqueeze(1))
        rank = (scores > chosen).sum(-1) + 1
        values, ids = scores.topk(top, dim=-1)
        return chosen.squeeze(1), rank, values, ids


def _read(cache: KVCache, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of `blocks`, one after the other: [blocks * page_size, kv_heads, head_dim]."""
    if isinstance(cache, CodedKVCache):
        return cache.keys.read(blocks), cache.values.read(blocks)
    return cache.k[blocks].flatten(0, 1), cache.v[blocks].flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """One sequence: q [L, heads, d], its last positions, against k, v [keys, kv_heads, d], in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    query_pos = torch.arange(k.shape[0] - q.shape[0], k.shape[0]).unsqueeze(1)
    key_pos = torch.arange(k.shape[0]).unsqueeze(0)
    hidden = key_pos > query_pos
    if window is not None:
        hidden |= key_pos <= query_pos - window
    probs = scores.masked_fill(hidden.to(scores.device), float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, v).to(q.dtype)


def apply_edits(logits: Tensor, edits: Edits) -> None:
    """In place."""
    flat = logits.view(-1)
    flat[edits.banned] = float("-inf")
    flat[edits.biased] += edits.bias


def filter_logits(scaled: Tensor, params: SamplingTensors) -> Tensor:
    """Sets what top-k, top-p or min-p drop to -inf. The best token always stays.

    top-k first; top-p over what is left, keeping the smallest set whose mass reaches top_p; min-p relative to the
    best token's probability. Among equal logits the lower token id is the better one.
    """
    vocab = scaled.shape[1]
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=scaled.device)
    k = torch.where(params.top_k <= 0, vocab, params.top_k).unsqueeze(1)
    values = values.masked_fill(rank >= k, float("-inf"))
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    drop = (before >= params.top_p.unsqueeze(1)) & (params.top_p.unsqueeze(1) < 1)
    drop |= probs < params.min_p.unsqueeze(1) * probs[:, :1]
    drop[:, 0] = False
    return torch.empty_like(scaled).scatter_(1, order, values.masked_fill(drop, float("-inf")))


def exponential_noise(keys: Tensor, vocab: int) -> Tensor:
    """Standard exponential variates float32 [R, vocab], a pure function of (key, token id).

    hash = fmix64(key + (token + 1) * 0x9E3779B97F4A7C15), the finalizer of MurmurHash3 over a Weyl sequence (as
    SplitMix64 does); u = (upper 32 bits + 0.5) / 2**32; the variate is -log1p(-u), exact for the small values that
    win a race.
    """
    token = torch.arange(1, vocab + 1, dtype=torch.int64, device=keys.device)
    x = keys.unsqueeze(1) + token * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 33)) * _signed(0xFF51AFD7ED558CCD)
    x = (x ^ _shift_right(x, 33)) * _signed(0xC4CEB9FE1A85EC53)
    x = x ^ _shift_right(x, 33)
    u = (_shift_right(x, 32).double() + 0.5) * 2.0**-32
    return (-torch.log1p(-u)).float()


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written: numpy asks the system for zeroed pages, torch fills them."""
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(dtype)


def _signed(value: int) -> int:
    """The int64 of the same bits."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, as torch has only the arithmetic one."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class ReferenceDevice(Device):
    """Plain torch on the host."""

    name = "reference"
    default_page_size = 16
    page_multiple = 1
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    dist_backend = "gloo"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.ops = Ops()

    def open(self, rank: int, threads: int | None) -> None:
        from octavo.backends.row_by_row import reference_ops  # built on this module

        self.ops = reference_ops()
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))

    def memory(self) -> tuple[int, int]:
        facts = psutil.virtual_memory()
        return facts.total, facts.available

    def allocate_kv(
        self, spec: KVSpec, num_pages: int, page_size: int, dtype: torch.dtype, quantized: KVFormat | None = None
    ) -> KVCache:
        assert not isinstance(spec, LatentAttention), "no family with latent attention exists yet"
        if quantized is not None:
            return CodedKVCache(spec, num_pages, page_size, quantized, _lazy_zeros)
        shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        return KVCache(_lazy_zeros(shape, dtype), _lazy_zeros(shape, dtype), page_size)
