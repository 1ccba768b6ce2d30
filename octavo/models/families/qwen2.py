"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optionally a sliding window in the upper layers."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import BadModelFile
from octavo.models.families._dense import WEIGHTS, read_dense
from octavo.models.spec import ConfigReader, DecoderSpec

ARCHITECTURES = ("Qwen2ForCausalLM",)
GGUF_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM"}

__all__ = ["ARCHITECTURES", "GGUF_ARCHITECTURES", "WEIGHTS", "spec"]

_KINDS = ("full_attention", "sliding_attention")


def spec(config: ConfigReader) -> DecoderSpec:
    config.only("use_mrope", False)
    dense = read_dense(config, qkv_bias=True)
    config.ignore("sliding_window", "max_window_layers", "layer_types")  # read below where they matter
    if not config.get("use_sliding_window", bool, False) or config.config.get("sliding_window", 4096) is None:
        return dense
    window, first = config.get("sliding_window", int, 4096), config.get("max_window_layers", int, 28)
    kinds = config.get("layer_types", list, [_KINDS[i >= first] for i in range(dense.num_layers)])
    if len(kinds) != dense.num_layers or any(kind not in _KINDS for kind in kinds) or window < 1:
        raise BadModelFile(
            f"{config.source}: sliding_window {window} with layer_types {repr(kinds)[:100]}",
            limit=f"a window above 0, and {dense.num_layers} of {' or '.join(_KINDS)}", fix="use the model's own",
        )  # fmt: skip
    return replace(dense, windows=tuple(window if kind == _KINDS[1] else None for kind in kinds))
