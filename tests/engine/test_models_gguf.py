"""Models in GGUF give the logits of `transformers` on the dequantized weights, for every block format."""

import itertools
import random

import gguf
import numpy as np
import pytest
import torch

from octavo.formats.gguf import BLOCK_TYPES
from octavo.formats.mapped import PLAIN_TYPES
from octavo.models.checkpoint import open_checkpoint
from octavo.models.loader import load_model
from octavo.quant.gguf_blocks import read_into
from tests.gguf_fixtures import quantized, write_gguf
from tests.matrix import SEED, sample
from tests.models_fixtures import expected_logits
from tests.paged_decoder import paged_logits, random_prompts, reference_device

TYPES = PLAIN_TYPES + BLOCK_TYPES
SETTINGS = {
    "llama": {
        "plain": {}, "tied": {"tie_word_embeddings": True}, "bias": {"attention_bias": True},
        "mlp_bias": {"mlp_bias": True}, "mha": {"num_key_value_heads": 4},
        "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
        "factors": {"rope_factors": [1.0 + 0.25 * i for i in range(32)]},
    },
    "qwen2": {
        "plain": {}, "tied": {"tie_word_embeddings": True},
        "yarn": {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0,
            },
        },
    },
}  # fmt: skip
CASES = [(arch, setting, kind) for arch in SETTINGS for setting, kind in itertools.product(SETTINGS[arch], TYPES)]


@pytest.mark.parametrize("case", sample(CASES, 24), ids="-".join)
def test_logits_equal_those_of_transformers(case, tmp_path):
    arch, setting, kind = case
    rng = random.Random(f"{SEED}/{case}")
    path = tmp_path / "model.gguf"
    model = write_gguf(path, arch, kind, rng.randrange(1 << 30), **SETTINGS[arch][setting])
    device = reference_device()
    checkpoint = open_checkpoint(tmp_path if rng.random() < 0.5 else path)
    assert checkpoint.eos_token_ids == (2, 3)
    decoder = load_model(checkpoint, device, torch.float32)
    prompts = random_prompts(rng, 64)
    for mine, theirs in zip(paged_logits(decoder, device, prompts, rng), expected_logits(model, prompts), strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-4, rtol=1e-4, msg=lambda m: f"OCTAVO_SEED={SEED}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "numpy"])
def test_every_type_equals_the_gguf_package(kind, dtype, kernels, monkeypatch):
    """With the kernel library and without, also across the borders of the chunks that bound its memory."""
    if not kernels:
        monkeypatch.setattr("octavo.backends.cpu.lib.available", lambda: False)
    monkeypatch.setattr("octavo.quant.gguf_blocks._CHUNK_ELEMENTS", 512)
    rng = np.random.default_rng(SEED)
    raw = quantized(rng.standard_normal((5, 768), dtype=np.float32), kind, rng)
    raw = np.ascontiguousarray(raw).view(np.uint8)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(5, 768)
    out = torch.empty(5, 768, dtype=dtype)
    read_into(out, raw, kind)
    torch.testing.assert_close(
        out, torch.from_numpy(np.array(expected)).to(dtype), atol=0, rtol=2e-7 if dtype == torch.float32 else 1e-2
    )
