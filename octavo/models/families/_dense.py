"""What the dense decoders of Llama's shape have in common: how config.json reads, and what the weights are called."""

from __future__ import annotations

import math
from typing import Any

from octavo.errors import BadModelFile
from octavo.models.spec import ConfigReader, DecoderSpec, RopeSpec, Weight

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

IGNORED = (
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "initializer_range", "use_cache",
    "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "attention_dropout",
    "hidden_dropout", "_name_or_path", "name_or_path", "output_attentions", "output_hidden_states", "return_dict",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "id2label", "label2id", "problem_type",
    "_attn_implementation", "_attn_implementation_autoset", "tokenizer_class", "transformers.js_config",
    "is_llama_config", "unsloth_version", "unsloth_fixed", "torchscript", "finetuning_task", "task_specific_params",
)  # fmt: skip
"""Keys that change nothing for inference: training, bookkeeping, tokens (read elsewhere) and how transformers runs."""

LIMITS = {
    "vocab_size": 1 << 24, "hidden_size": 1 << 20, "intermediate_size": 1 << 24, "num_layers": 4096,
    "num_heads": 1 << 16, "num_kv_heads": 1 << 16, "head_dim": 1 << 16, "context_len": 1 << 28,
}  # fmt: skip
"""Beyond any model there is; they keep a hostile config from making us allocate without end."""

_LAYER = "model.layers.{i}."
WEIGHTS = (
    Weight("model.embed_tokens.weight", "embed.weight", shard="vocab"),
    Weight(_LAYER + "input_layernorm.weight", "layers.{i}.attention_norm.weight"),
    Weight(_LAYER + "self_attn.q_proj.weight", "layers.{i}.qkv.weight", shard="out", part=0),
    Weight(_LAYER + "self_attn.k_proj.weight", "layers.{i}.qkv.weight", shard="out", part=1),
    Weight(_LAYER + "self_attn.v_proj.weight", "layers.{i}.qkv.weight", shard="out", part=2),
    Weight(_LAYER + "self_attn.q_proj.bias", "layers.{i}.qkv.bias", shard="out", part=0, optional=True),
    Weight(_LAYER + "self_attn.k_proj.bias", "layers.{i}.qkv.bias", shard="out", part=1, optional=True),
    Weight(_LAYER + "self_attn.v_proj.bias", "layers.{i}.qkv.bias", shard="out", part=2, optional=True),
    Weight(_LAYER + "self_attn.o_proj.weight", "layers.{i}.o.weight", shard="in"),
    Weight(_LAYER + "self_attn.o_proj.bias", "layers.{i}.o.bias", optional=True),
    Weight(_LAYER + "post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    Weight(_LAYER + "mlp.gate_proj.weight", "layers.{i}.gate_up.weight", shard="out", part=0),
    Weight(_LAYER + "mlp.up_proj.weight", "layers.{i}.gate_up.weight", shard="out", part=1),
    Weight(_LAYER + "mlp.gate_proj.bias", "layers.{i}.gate_up.bias", shard="out", part=0, optional=True),
    Weight(_LAYER + "mlp.up_proj.bias", "layers.{i}.gate_up.bias", shard="out", part=1, optional=True),
    Weight(_LAYER + "mlp.down_proj.weight", "layers.{i}.down.weight", shard="in"),
    Weight(_LAYER + "mlp.down_proj.bias", "layers.{i}.down.bias", optional=True),
    Weight("model.norm.weight", "norm.weight"),
    Weight("lm_head.weight", "lm_head.weight", shard="vocab", optional=True),
)


def read_dense(config: ConfigReader, **settings: Any) -> DecoderSpec:
    """The spec from the keys that all of these families share; `settings` are the fields a family decides itself."""
    config.ignore(*IGNORED)
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    if heads < 1 or (hidden % heads and config.optional("head_dim") is None):
        raise BadModelFile(f"{config.source}: hidden_size {hidden} does not split over {heads} heads", fix=_FIX)
    head_dim = config.get("head_dim", int, hidden // heads)
    activation = config.get("hidden_act", str, "silu")
    if activation not in ACTIVATIONS:
        raise BadModelFile(f"{config.source}: hidden_act {activation!r}", limit=", ".join(ACTIVATIONS), fix=_FIX)
    context_len = config.get("max_position_embeddings", int)
    rope, context_len = read_rope(config, head_dim, context_len)
    spec = DecoderSpec(
        vocab_size=config.get("vocab_size", int), hidden_size=hidden,
        intermediate_size=config.get("intermediate_size", int), num_layers=config.get("num_hidden_layers", int),
        num_heads=heads, num_kv_heads=config.get("num_key_value_heads", int, heads), head_dim=head_dim,
        rms_eps=config.get("rms_norm_eps", float), context_len=context_len, rope=rope,
        activation=ACTIVATIONS[activation], tie_embeddings=config.get("tie_word_embeddings", bool, False),
        **settings,
    )  # fmt: skip
    _check(spec, config.source)
    return spec


_FIX = "use the model's own config.json"


def read_rope(config: ConfigReader, head_dim: int, context_len: int) -> tuple[RopeSpec, int]:
    """The rotary embedding, and the context it stretches `context_len` to.

    Newer files hold all of it in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`.
    """
    outer_theta = config.get("rope_theta", (int, float), 10000.0)
    new, old = config.optional("rope_parameters") or {}, config.optional("rope_scaling") or {}
    for fields in (new, old):
        if not isinstance(fields, dict):
            raise BadModelFile(f"{config.source}: rope parameters are {repr(fields)[:100]}, not an object", fix=_FIX)
    if new and old and _scaling_of(new) != _scaling_of(old):
        raise BadModelFile(
            f"{config.source}: rope_parameters {repr(new)[:200]} and rope_scaling {repr(old)[:200]} differ",
            fix="remove the one that is wrong",
        )  # fmt: skip
    fields = new or old
    rope = ConfigReader(fields, f"{config.source}, rope parameters")
    theta = rope.get("rope_theta", float, float(outer_theta))
    kind = rope.get("rope_type", str, fields.get("type") or "default")
    rope.ignore("type")
    if kind not in _ROPE_KINDS:
        raise BadModelFile(
            f"{config.source}: rope type {kind!r}", limit=", ".join(_ROPE_KINDS), fix="use another model"
        )
    base = RopeSpec(theta, head_dim)
    spec, context_len = _ROPE_KINDS[kind](rope, base, context_len)
    rope.finish()
    numbers = (spec.theta, spec.factor, spec.low_freq_factor, spec.high_freq_factor, *spec.factors)
    numbers += (spec.attention_factor or 1.0,)
    if not all(0 < n < math.inf for n in numbers) or head_dim % 2 or spec.theta <= 1:
        raise BadModelFile(f"{config.source}: rope parameters {repr(fields)[:200]} with head_dim {head_dim}", fix=_FIX)
    return spec, context_len


def _scaling_of(fields: dict[str, Any]) -> dict[str, Any]:
    """What stands in both forms; the older one calls `rope_type` also `type`, and has the base elsewhere."""
    kind = fields.get("rope_type") or fields.get("type") or "default"
    return {**fields, "rope_type": kind, "type": None, "rope_theta": None}


def _plain(rope: ConfigReader, base: RopeSpec, context_len: int) -> tuple[RopeSpec, int]:
    return base, context_len


def _linear(rope: ConfigReader, base: RopeSpec, context_len: int) -> tuple[RopeSpec, int]:
    """Position interpolation (arXiv:2306.15595); the config's context is the one before stretching."""
    factor = rope.get("factor", float)
    return _with(base, scaling="linear", factor=factor), _stretched(rope, context_len, factor)


def _llama3(rope: ConfigReader, base: RopeSpec, context_len: int) -> tuple[RopeSpec, int]:
    spec = _with(
        base, scaling="llama3", factor=rope.get("factor", float), low_freq_factor=rope.get("low_freq_factor", float),
        high_freq_factor=rope.get("high_freq_factor", float),
        original_context=rope.get("original_max_position_embeddings", int),
    )  # fmt: skip
    if not 0 < spec.low_freq_factor < spec.high_freq_factor or spec.original_context < 1:
        raise BadModelFile(
            f"{rope.source}: low_freq_factor {spec.low_freq_factor}, high_freq_factor {spec.high_freq_factor}, "
            f"original_max_position_embeddings {spec.original_context}",
            limit="0 < low < high, and a context above 0", fix=_FIX,
        )  # fmt: skip
    return spec, context_len


def _yarn(rope: ConfigReader, base: RopeSpec, context_len: int) -> tuple[RopeSpec, int]:
    """arXiv:2309.00071. The attention factor is given, or 0.1 * mscale * ln(factor) + 1 over that of mscale_all_dim."""
    factor = rope.get("factor", float)
    original = rope.get("original_max_position_embeddings", int, context_len)
    beta_fast, beta_slow = rope.get("beta_fast", float, 32.0), rope.get("beta_slow", float, 1.0)
    if factor < 1 or original < 1 or not 0 < beta_slow <= beta_fast:
        raise BadModelFile(
            f"{rope.source}: yarn factor {factor}, context {original}, betas {beta_fast} and {beta_slow}", fix=_FIX
        )
    mscale, mscale_all_dim = rope.get("mscale", float, 0.0), rope.get("mscale_all_dim", float, 0.0)
    attention_factor = rope.get("attention_factor", float, math.nan)
    if math.isnan(attention_factor):
        grow = 0.1 * math.log(factor)
        both = mscale > 0 and mscale_all_dim > 0
        attention_factor = (grow * mscale + 1) / (grow * mscale_all_dim + 1) if both else grow + 1
    spec = _with(
        base, scaling="yarn", factor=factor, original_context=original, attention_factor=attention_factor,
        beta_fast=beta_fast, beta_slow=beta_slow, truncate=rope.get("truncate", bool, True),
    )  # fmt: skip
    return spec, max(context_len, _stretched(rope, original, factor))


def _factors(rope: ConfigReader, base: RopeSpec, context_len: int) -> tuple[RopeSpec, int]:
    """A divisor for each frequency, as GGUF files hold in `rope_freqs.weight`; no config.json has this type."""
    factors = rope.get("factors", list)
    if len(factors) != base.rotary_dim // 2:
        raise BadModelFile(f"{rope.source}: {len(factors)} factors", limit=f"{base.rotary_dim // 2}", fix=_FIX)
    return _with(base, scaling="factors", factors=tuple(float(f) for f in factors)), context_len


_ROPE_KINDS = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "factors": _factors}


def _with(base: RopeSpec, **fields: Any) -> RopeSpec:
    return RopeSpec(base.theta, base.rotary_dim, **fields)


def _stretched(rope: ConfigReader, context_len: int, factor: float) -> int:
    if not 0 < factor <= LIMITS["context_len"]:
        raise BadModelFile(
            f"{rope.source}: factor is {factor}", limit=f"above 0, at most {LIMITS['context_len']}", fix=_FIX
        )
    return int(context_len * factor)


def _check(spec: DecoderSpec, source: str) -> None:
    for name, limit in LIMITS.items():
        value = getattr(spec, name)
        if not 1 <= value <= limit:
            raise BadModelFile(f"{source}: {name} is {value}", limit=f"1 to {limit}", fix=_FIX)
    if spec.num_heads % spec.num_kv_heads:
        raise BadModelFile(
            f"{source}: {spec.num_heads} attention heads do not divide over {spec.num_kv_heads} key-value heads",
            fix=_FIX,
        )
    if not 0 <= spec.rms_eps < 1:
        raise BadModelFile(f"{source}: rms_norm_eps is {spec.rms_eps}", limit="0 to 1", fix=_FIX)
