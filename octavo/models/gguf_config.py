"""A GGUF file's hyperparameters and tensor names, told as a Hugging Face checkpoint would tell them. No torch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from octavo.errors import BadModelFile
from octavo.formats.gguf import GGUFFile
from octavo.models.spec import ConfigReader

_AGAIN = "convert the model again"
ROPE_FACTORS = "rope_freqs.weight"

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; the name itself where there is none."""
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(name, name)


def hf_config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The config.json that a Hugging Face model of the same shape would have.

    Raises BadModelFile for a key that is not known, and for files that do not hold a whole dense model.
    """
    prefix = file.metadata["general.architecture"] + "."
    general = ConfigReader(file.metadata, str(file.path))
    general.only("general.type", "model")
    general.only("split.count", 0, 1, fix="join the parts into one file with llama-gguf-split --merge")
    own = {key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)}
    arch = ConfigReader(own, f"{file.path}: {prefix}*")
    heads, hidden = arch.get("attention.head_count", int), arch.get("embedding_length", int)
    if heads < 1:
        raise BadModelFile(f"{arch.source}: attention.head_count is {heads}", limit="at least 1", fix=_AGAIN)
    head_dim = arch.get("attention.key_length", int, hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        arch.only(key, head_dim)
    arch.only("expert_count", 0)
    arch.only("expert_used_count", 0)
    arch.only("tensor_data_layout", "reference")
    config = {
        "architectures": [architecture],
        "vocab_size": _vocab_size(file, arch),
        "hidden_size": hidden,
        "intermediate_size": arch.get("feed_forward_length", int),
        "num_hidden_layers": arch.get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": arch.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": arch.get("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": arch.get("context_length", int),
        "rope_theta": arch.get("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(file, arch),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    arch.finish()
    return config


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """The end-of-sequence and end-of-turn tokens."""
    reader = ConfigReader(file.metadata, str(file.path))
    ids = [reader.get(f"tokenizer.ggml.{kind}_token_id", int, -1) for kind in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for token in ids if token >= 0))


def interleaved_rows(num_rows: int, num_heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each row of q or k in half-split order, the row of the file that holds it.

    llama.cpp's converter lays a head's halves (a_0 … a_n, b_0 … b_n) out as a_0 b_0 a_1 b_1 …; this undoes it.
    """
    pairs = np.arange(num_rows, dtype=np.int64).reshape(num_heads, num_rows // num_heads // 2, 2)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows)


def _vocab_size(file: GGUFFile, arch: ConfigReader) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise BadModelFile(f"{file.path}: no tensor token_embd.weight", fix="use a file with the whole model")
    rows = table.shape[0]
    said = arch.get("vocab_size", int, rows)
    if said != rows:
        raise BadModelFile(f"{file.path}: {rows} rows in token_embd.weight", limit=f"vocab_size is {said}", fix=_AGAIN)
    return rows


def _rope_scaling(file: GGUFFile, arch: ConfigReader) -> dict[str, Any] | None:
    kind, factor = arch.get("rope.scaling.type", str, "none"), arch.get("rope.scaling.factor", float, 1.0)
    original = arch.optional("rope.scaling.original_context_length")
    arch.ignore("rope.scaling.finetuned")
    if ROPE_FACTORS in file.tensors:
        arch.only("rope.scaling.type", "none", "llama3")
        return {"rope_type": "factors", "factors": _factors(file)}
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        scaling["beta_fast"] = arch.optional("rope.scaling.yarn_beta_fast")
        scaling["beta_slow"] = arch.optional("rope.scaling.yarn_beta_slow")
        arch.only("rope.scaling.yarn_ext_factor", 1.0)
        arch.only("rope.scaling.yarn_attn_factor", 1.0)
        arch.only("rope.scaling.attn_factor", 1.0)
    return scaling


def _factors(file: GGUFFile) -> list[float]:
    info = file.tensors[ROPE_FACTORS]
    if info.type != "F32" or len(info.shape) != 1:
        raise BadModelFile(
            f"{file.path}: {ROPE_FACTORS} is {info.type} {info.shape}", limit="F32 of one dimension",
            fix=_AGAIN,
        )  # fmt: skip
    values: list[float] = file.data(ROPE_FACTORS).view("<f4").tolist()
    return values
