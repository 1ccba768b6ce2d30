"""Mistral: Llama without biases, in some versions with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import BadModelFile
from octavo.models.families._dense import WEIGHTS, read_dense
from octavo.models.spec import ConfigReader, DecoderSpec

ARCHITECTURES = ("MistralForCausalLM",)

__all__ = ["ARCHITECTURES", "WEIGHTS", "spec"]


def spec(config: ConfigReader) -> DecoderSpec:
    dense = read_dense(config)
    if config.optional("sliding_window") is None:
        return dense
    window = config.get("sliding_window", int)
    if window < 1:
        raise BadModelFile(
            f"{config.source}: sliding_window is {window}", limit="at least 1", fix="use the model's own"
        )
    return replace(dense, windows=(window,) * dense.num_layers)
