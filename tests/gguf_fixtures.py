"""Tiny random GGUF models, and the `transformers` models that they must equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from octavo.models.gguf_config import hf_name
from tests.models_fixtures import random_model

Array = np.ndarray[Any, np.dtype[Any]]
SIZES = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_SCALE_FIELDS = {"Q4_K": ((0, 2e-4), (2, 2e-4)), "Q5_K": ((0, 1e-4), (2, 1e-4)), "Q6_K": ((208, 2e-5),)}
"""byte offset of each float16 scale in a block, and a value that keeps the weights near a tenth"""


def quantized(values: Array, kind: str, rng: np.random.Generator) -> Array:
    """`values` as bytes of that type; random blocks for those that the `gguf` package can only dequantize."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in _SCALE_FIELDS:
        return gguf.quants.quantize(values, number)
    block, nbytes = gguf.GGML_QUANT_SIZES[number]
    raw = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, nbytes), dtype=np.uint8)
    for offset, scale in _SCALE_FIELDS[kind]:
        raw[..., offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    return raw.reshape(*values.shape[:-1], -1)


def interleave(values: Array, heads: int) -> Array:
    """How llama.cpp's converter reorders the rows of q and k."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def halves(values: Array, heads: int) -> Array:
    """The inverse of `interleave`."""
    split = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def write_gguf(
    path: Path, arch: str, kind: str, seed: int, rope_factors: list[float] | None = None, **settings: Any
) -> torch.nn.Module:
    """Writes a file whose matrices are of type `kind`, and returns the same model with dequantized weights."""
    model = random_model(arch, seed, **{**SIZES, **settings})
    rng = np.random.default_rng(seed)
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    add_rope(writer, config.rope_parameters)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
        model.model.rotary_emb.inv_freq /= torch.tensor(rope_factors)
    parameters = dict(model.named_parameters())
    for name in gguf_names(config.num_hidden_layers):
        parameter = parameters.get(hf_name(name))
        if parameter is None:
            continue
        values = parameter.detach().numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2], 0)
        if arch == "llama" and heads:
            values = interleave(values, heads)
        stored = kind if values.ndim == 2 else "F32"
        raw = quantized(values, stored, rng)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[stored])
        exact = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[stored]).reshape(values.shape)
        exact = halves(exact, heads) if arch == "llama" and heads else exact
        parameter.data = torch.from_numpy(np.array(exact, np.float32))
    model.tie_weights()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    if rope["rope_type"] == "default":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
    writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def gguf_names(layers: int) -> list[str]:
    modules = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    names = [f"blk.{i}.{m}.{p}" for i in range(layers) for m in modules for p in ("weight", "bias")]
    return ["token_embd.weight", *names, "output_norm.weight", "output.weight"]
