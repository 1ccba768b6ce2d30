"""Scales that a checkpoint brings for an fp8 KV cache: read, shared by ranks, checked, and worth having."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.backends.kv import KV_FORMATS
from octavo.dist.group import SINGLE
from octavo.errors import BadModelFile
from octavo.models.checkpoint import open_checkpoint
from octavo.models.loader import _kv_scales, load_model
from tests.matrix import SEED
from tests.models_fixtures import random_model, save
from tests.paged_decoder import reference_device

HEADS, LAYERS = 2, 3
KV_ONLY = {
    "quant_method": "compressed-tensors", "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}  # fmt: skip


def write(folder, scales, **settings):
    """A tiny model with these tensors beside its weights, and its config with these settings."""
    save(random_model("llama", SEED), folder, torch.float32, sharded=False)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **scales}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def name(layer, which, place=""):
    return f"model.layers.{layer}.self_attn.{place}{which}_scale"


def test_one_number_or_one_a_head(tmp_path):
    scales = {
        name(0, "k"): torch.tensor(0.5), name(0, "v"): torch.tensor([0.25]),
        name(2, "k", "k_proj."): torch.tensor([1.0, 2.0]).bfloat16(), name(2, "v", "v_proj."): torch.tensor([3.0, 4.0]),
    }  # fmt: skip
    checkpoint = open_checkpoint(write(tmp_path, scales, quantization_config=KV_ONLY))
    device = reference_device()
    decoder = load_model(checkpoint, device, torch.float32)
    specs = {layer: group.spec for group in decoder.kv_groups for layer in group.layers}
    for form in (None, *KV_FORMATS.values()):
        caches = [device.allocate_kv(specs[i], 4, 16, torch.float32, form) for i in range(LAYERS)]
        decoder.scale_caches(caches)
        if form is None or form.per_token_head:
            assert all(cache.k_scale is None for cache in caches)
        else:
            assert [c.k_scale.tolist() for c in caches] == [[0.5, 0.5], [1, 1], [1, 2]]
            assert [c.v_scale.tolist() for c in caches] == [[0.25, 0.25], [1, 1], [3, 4]]
    second = _kv_scales(checkpoint, SimpleNamespace(rank=1, size=2))
    assert [t.tolist() for t in second[2]] == [[2], [4]] and [t.tolist() for t in second[0]] == [[0.5], [0.25]]


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({name(0, "k"): torch.ones(1)}, "layer 0 has only a k_scale"),
        ({name(7, "k"): torch.ones(1)}, "is of no layer"),
        ({name(1, "v"): torch.ones(3)}, r"is F32 \(3,\); limit: one number, or one for each of 2 kv heads"),
        ({name(1, "v"): torch.ones(1), name(1, "v", "attn."): torch.ones(1)}, "stands twice"),
        ({name(1, "v"): torch.tensor(-1.0), name(1, "k"): torch.tensor(1.0)}, "holds -1; limit: scales above 0"),
        ({name(1, "v"): torch.tensor(torch.nan), name(1, "k"): torch.tensor(1.0)}, "holds nan"),
        ({"model.layers.0.self_attn.q_scale": torch.ones(1)}, "but not in a model of this config"),
    ],
)
def test_scales_that_cannot_be(tmp_path, scales, message):
    with pytest.raises(BadModelFile, match=message):
        _kv_scales(open_checkpoint(write(tmp_path, scales)), SINGLE)


@pytest.mark.parametrize(
    "changes",
    [{"config_groups": {"group_0": {}}}, {"quant_method": "fp8"}, {"kv_cache_scheme": None},
     {"kv_cache_scheme": {**KV_ONLY["kv_cache_scheme"], "type": "int"}}],
)  # fmt: skip
def test_weights_or_other_schemes_are_refused(tmp_path, changes):
    with pytest.raises(BadModelFile, match=r"quantization .* is not supported"):
        open_checkpoint(write(tmp_path, {}, quantization_config={**KV_ONLY, **changes}))


def test_a_scale_keeps_large_keys(tmp_path):
    """Keys of a thousand saturate at 448 without a scale, and come back with one."""
    device = reference_device()
    decoder = load_model(open_checkpoint(write(tmp_path, {})), device, torch.float32)
    spec = decoder.kv_groups[0].spec
    x = torch.randn(
        16, HEADS, spec.head_dim, generator=torch.Generator().manual_seed(random.Random(SEED).getrandbits(32))
    )
    x *= 1000 / x.abs().amax()
    errors = []
    for scale in (1.0, 1000 / 448):
        cache = device.allocate_kv(spec, 1, 16, torch.float32, KV_FORMATS["fp8"])
        cache.set_scales(torch.full((HEADS,), scale), torch.full((HEADS,), scale))
        cache.keys.write(x, torch.arange(16))
        errors.append(((cache.keys.read(torch.tensor([0])) - x).abs().max() / 1000).item())
    assert errors[0] > 0.5 and errors[1] < 0.04, errors
