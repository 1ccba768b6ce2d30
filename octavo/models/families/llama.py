"""Llama 2 and 3, and what is built like them (SmolLM2, Yi, …)."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from octavo.models.families._dense import WEIGHTS, read_dense
from octavo.models.spec import ConfigReader, DecoderSpec

ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
GGUF_INTERLEAVED_ROPE = True
"""In GGUF the rows of q and k are reordered for a rotation of neighbouring channels instead of halves."""

__all__ = ["ARCHITECTURES", "GGUF_ARCHITECTURES", "GGUF_INTERLEAVED_ROPE", "WEIGHTS", "gguf_settings", "spec"]


def spec(config: ConfigReader) -> DecoderSpec:
    config.only("rope_interleaved", False)
    attention_bias = config.get("attention_bias", bool, False)
    return read_dense(
        config, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=config.get("mlp_bias", bool, False)
    )


def gguf_settings(tensors: Container[str]) -> dict[str, Any]:
    """What config.json says and GGUF's metadata does not."""
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
