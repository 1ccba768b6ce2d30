"""Our decoder on the reference operations gives the logits of `transformers`, for every family and setting."""

import itertools
import random

import pytest
import torch

from octavo.models.checkpoint import open_checkpoint
from octavo.models.loader import load_model
from tests.matrix import SEED, sample
from tests.models_fixtures import expected_logits, random_model, save
from tests.paged_decoder import paged_logits, random_prompts, reference_device

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    "llama3": {**LLAMA3, "rope_theta": 1000.0},
    "yarn": {**YARN, "rope_theta": 10000.0},
    "yarn-factor": {**YARN, "rope_theta": 10000.0, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": {**YARN, "rope_theta": 10000.0, "mscale": 1.2, "mscale_all_dim": 0.5, "truncate": False},
}
HEADS = {f"heads{q}-{kv}": {"num_attention_heads": q, "num_key_value_heads": kv} for q, kv in ((4, 4), (6, 2), (4, 1))}
TIED = {"untied": {}, "tied": {"tie_word_embeddings": True}}
VARIANTS = {
    "llama": {
        "plain": {}, "attention_bias": {"attention_bias": True}, "mlp_bias": {"mlp_bias": True},
        "head_dim": {"head_dim": 20}, "both_bias": {"attention_bias": True, "mlp_bias": True},
    },
    "mistral": {"full": {"sliding_window": None}, "window": {"sliding_window": 9, "head_dim": 10}},
    "qwen2": {
        "full": {}, "gelu": {"hidden_act": "gelu_pytorch_tanh"},
        "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        "kinds": {
            "use_sliding_window": True, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    },
}  # fmt: skip
STORED = {
    f"{name}-{how}": (dtype, how == "sharded")
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16))
    for how in ("single", "sharded")
}
CASES = [
    (family, variant, rope, heads, tied, stored)
    for family in VARIANTS
    for variant, rope, heads, tied, stored in itertools.product(VARIANTS[family], ROPES, HEADS, TIED, STORED)
]


@pytest.mark.parametrize("case", sample(CASES, 100), ids="-".join)
def test_logits_equal_those_of_transformers(case, tmp_path):
    family, variant, rope, heads, tied, stored = case
    rng = random.Random(f"{SEED}/{case}")
    settings = {**VARIANTS[family][variant], **HEADS[heads], **TIED[tied], "rope_parameters": dict(ROPES[rope])}
    dtype, sharded = STORED[stored]
    model = save(random_model(family, rng.randrange(1 << 30), **settings), tmp_path, dtype, sharded)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == sharded
    device = reference_device()
    decoder = load_model(open_checkpoint(tmp_path), device, torch.float32)
    prompts = random_prompts(rng, model.config.vocab_size)
    ours = paged_logits(decoder, device, prompts, rng)
    for mine, theirs in zip(ours, expected_logits(model, prompts), strict=True):
        assert theirs.std() > 0.3, "a model whose logits say nothing"
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4, msg=lambda m: f"OCTAVO_SEED={SEED}: {m}")
