"""Tiny random models written by `transformers`, and what it says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

transformers.utils.logging.disable_progress_bar()
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
}
SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip


def random_model(family: str, seed: int, **settings: Any) -> torch.nn.Module:
    """A `transformers` model with all weights random, biases and norms too, and logits a few units wide."""
    config_class, model_class = CLASSES[family]
    config = config_class(**{**SIZES, **settings}, attn_implementation="eager")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 * 1.3)
    return model


@torch.inference_mode()
def expected_logits(model: torch.nn.Module, prompts: list[list[int]]) -> list[Tensor]:
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def save(model: torch.nn.Module, path: Path, dtype: torch.dtype, sharded: bool) -> torch.nn.Module:
    """Writes the model as `transformers` does, and returns it as it reads it back, in float32."""
    model.to(dtype).save_pretrained(path, max_shard_size="20KB" if sharded else "1GB")
    return type(model).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
