"""8-bit codes of keys and values: what the kernels store and read is what the reference does, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.backends.base import AttentionMeta
from octavo.backends.codes import CodedKVCache, decode, encode
from octavo.backends.cpu.ops import PanelKVCache
from octavo.backends.kv import KV_FORMATS, FullAttention
from tests.backend.conftest import bf16

FORMS = list(dict.fromkeys(KV_FORMATS.values()))
FIXED = [form for form in FORMS if not form.per_token_head]
PAGE = 32
EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def written(ops, cache, k, v):
    """k and v [T, heads, dim] in slots 0, 1, …"""
    tokens = len(k)
    meta = AttentionMeta(
        torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32),
        torch.arange(-(-tokens // PAGE), dtype=torch.int32).unsqueeze(0), torch.arange(tokens), PAGE,
    )  # fmt: skip
    ops.write_kv(k, v, cache, meta)
    return meta


def both_caches(ops, reference, form, k, v, scales=None):
    """The same keys and values in panels and in the reference's cache."""
    spec, pages = FullAttention(k.shape[1], k.shape[2]), -(-len(k) // PAGE)
    plain = CodedKVCache(spec, pages, PAGE, form, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    panels = PanelKVCache(spec, pages, PAGE, form)
    for cache in (plain, panels):
        if scales is not None:
            cache.k_scale.copy_(scales)
            cache.v_scale.copy_(scales.flip(0))
    written(reference, plain, k, v)
    written(ops, panels, k, v)
    return plain, panels


def panel_codes(data, spec, keys):
    """Codes [pages, PAGE, heads, dim] of rows of panels."""
    heads, dim = spec.num_kv_heads, spec.head_dim
    width = dim if keys else -(-dim // 16) * 16
    codes = data[:, : heads * PAGE * width]
    if keys:
        return (
            codes.view(-1, heads, PAGE // 16, dim // 2, 16, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1, PAGE, heads, dim)
        )
    pairs = codes.view(-1, heads, PAGE // 16, 8, width, 2).permute(0, 2, 3, 5, 1, 4)
    return pairs.reshape(-1, PAGE, heads, width)[..., :dim]


def panel_scales(data, heads):
    return data.view(torch.float32)[:, -heads * PAGE :].view(-1, heads, PAGE).transpose(1, 2)


def assert_same_content(plain, panels, spec):
    for mine, theirs, keys in ((panels.k, plain.keys, True), (panels.v, plain.values, False)):
        assert torch.equal(panel_codes(mine, spec, keys), theirs.codes)
        if plain.k_scale is None:
            scales = panel_scales(mine, spec.num_kv_heads)
            assert torch.equal(scales.nan_to_num(-1), theirs.scales.nan_to_num(-1))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("dim", [8, 72, 128])
def test_kernels_store_what_the_reference_stores(ops, reference, form, dim):
    heads, tokens = random.randint(1, 3), 2 * PAGE
    magnitudes = 10.0 ** torch.randint(-42, 39, (2, tokens, heads, 1))
    k, v = (torch.randn(2, tokens, heads, dim) * magnitudes).bfloat16()
    k[random.randrange(tokens)] = 0
    v[random.randrange(tokens), 0, 3] = random.choice([float("nan"), float("inf"), float("-inf")])
    scales = None if form.per_token_head else torch.rand(heads) * 3 + 0.01
    plain, panels = both_caches(ops, reference, form, k, v, scales)
    assert_same_content(plain, panels, FullAttention(heads, dim))


@pytest.mark.parametrize("form", FIXED, ids=lambda form: form.name)
def test_every_number_rounds_as_in_the_reference(ops, reference, form):
    x = EVERY_BF16.view(-1, 1, 128)
    for scale in (1.0, random.uniform(0.001, 100)):
        plain, panels = both_caches(ops, reference, form, x, x, torch.tensor([scale]))
        assert_same_content(plain, panels, FullAttention(1, 128))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_kernels_read_every_code(ops, form):
    """A token that sees only itself gets its own value back."""
    cache = PanelKVCache(FullAttention(1, 256), 1, PAGE, form)
    zeros = torch.zeros(1, 1, 256, dtype=torch.bfloat16)
    meta = written(ops, cache, zeros, zeros)
    codes, scale = torch.arange(256, dtype=torch.uint8), torch.tensor([random.uniform(0.01, 10)])
    if form.code == "int8":
        codes[128] = 0  # never stored
    cache.v[0, : 16 * 256].view(8, 256, 2)[0, :, 0] = codes
    if form.per_token_head:
        panel_scales(cache.k, 1)[0, 0] = 1
        panel_scales(cache.v, 1)[0, 0] = scale
    else:
        cache.v_scale.copy_(scale)
    got = ops.attention(zeros, cache, meta, 1.0, None)
    want = decode(codes.unsqueeze(0), form, scale)
    torch.testing.assert_close(got[0].float(), want, rtol=2**-7, atol=0, equal_nan=True)
    cache.v_scale = None if cache.v_scale is None else cache.v_scale.fill_(1)
    if form.per_token_head:
        panel_scales(cache.v, 1)[0, 0] = 1
    exact = decode(codes.unsqueeze(0), form, torch.ones(1))
    got = ops.attention(zeros, cache, meta, 1.0, None)[0].float()
    assert torch.equal(got.nan_to_num(-1), exact.nan_to_num(-1)) and torch.equal(got.isnan(), exact.isnan())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_numbers_come_back_to_half_a_step(form):
    """The error is at most half the distance of neighbouring codes: a 254th of the largest for int8, a 16th (8th) of
    the number itself for fp8 with three (two) bits of mantissa, or half of the least one."""
    x = bf16(500, 4, 64)
    codes, scales = encode(x, form, None if form.per_token_head else torch.ones(4))
    back = decode(codes, form, torch.ones(4) if scales is None else scales)
    scale = torch.ones(500, 4) if scales is None else scales
    relative, least = {"int8": (0, 0.5), "fp8_e4m3": (2**-4, 2**-10), "fp8_e5m2": (2**-3, 2**-17)}[form.code]
    bound = torch.maximum(x.float().abs() * relative, (scale * least).unsqueeze(-1)) * (1 + 1e-5)
    assert ((back - x.float()).abs() <= bound).all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_large_numbers_saturate_and_broken_ones_stay_broken(form):
    x = torch.tensor([[1e30, -1e30, 1.0, 0.0]]), torch.tensor([[float("inf"), 1.0, float("nan"), 0.0]])
    scale = None if form.per_token_head else torch.ones(1)
    large, broken = (decode(c, form, s if scale is None else scale) for c, s in (encode(t, form, scale) for t in x))
    if form.per_token_head:
        assert broken.isnan().all()
        torch.testing.assert_close(large[0], torch.tensor([1e30, -1e30, 0, 0]))
    else:
        assert broken.isnan().tolist() == [[True, False, True, False]]
        assert large[0].tolist() == [form.largest, -form.largest, 1, 0]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_broken_token_shows(ops, form):
    """NaN in a value reaches the tokens that see it, so that the engine ends the request."""
    k, v = bf16(40, 2, 64), bf16(40, 2, 64)
    v[20, 0, 5] = random.choice([float("nan"), float("inf")])
    cache = PanelKVCache(FullAttention(2, 64), 2, PAGE, form)
    meta = written(ops, cache, k, v)
    out = ops.attention(bf16(40, 2, 64), cache, meta, 0.125, None)
    assert out[20:, 0].isnan().any(-1).all() and out[:, 1].isfinite().all()
