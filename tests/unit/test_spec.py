"""config.json to DecoderSpec: every key is read, ignored by name, or refused by name."""

import copy
import json
import random

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.backends.kv import FullAttention, SlidingWindow, group_layers
from octavo.errors import BadModelFile
from octavo.models.registry import all_families, family_of
from octavo.models.rope import inverse_frequencies, rope_table
from octavo.models.spec import ConfigReader, DecoderSpec, RopeSpec
from tests.matrix import SEED

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}  # fmt: skip
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def read(config: dict, **changes) -> DecoderSpec:
    config = {**config, **changes}
    reader = ConfigReader(config, "config.json")
    spec = family_of(config["architectures"][0], "config.json").spec(reader)
    reader.finish()
    return spec


def test_families_are_found_by_their_files():
    names = {name for family in all_families() for name in family.architectures}
    assert names >= {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"}


@pytest.mark.parametrize(
    "config_class", [transformers.LlamaConfig, transformers.MistralConfig, transformers.Qwen2Config]
)
def test_a_whole_config_of_transformers_is_understood(config_class):
    config = config_class().to_dict()
    config["architectures"] = [config_class.__name__.replace("Config", "ForCausalLM")]
    spec = read(config)
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (4096, 32, config["vocab_size"])


def test_defaults():
    spec = read(LLAMA)
    assert spec.head_dim == 16
    assert spec.rope == RopeSpec(10000.0, 16)
    assert [spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.tie_embeddings] == [False] * 4
    assert read({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).num_kv_heads == 4
    assert read(QWEN2).qkv_bias
    assert not read(QWEN2).o_bias


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 4}], ids=str)
def test_old_and_new_forms_of_rope_are_one(scaling):
    new = read(LLAMA, rope_parameters={**(scaling or {"rope_type": "default"}), "rope_theta": 5e5})
    old_scaling = copy.copy(scaling)
    if old_scaling:
        old_scaling["type"] = old_scaling.pop("rope_type")
    assert read(LLAMA, rope_scaling=old_scaling, rope_theta=500000) == new
    assert new.rope.theta == 5e5


def test_both_forms_of_rope_must_agree():
    both = {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    assert read(LLAMA, **both) == read(LLAMA, rope_parameters=both["rope_parameters"])
    for other in ({"rope_type": "yarn", "factor": 4.0}, {**LLAMA3, "factor": 9.0}):
        for plain in ({"rope_type": "default", "rope_theta": 1e4}, {"rope_theta": 1e4}, both["rope_parameters"]):
            with pytest.raises(BadModelFile, match=r"rope_parameters .* and rope_scaling .* differ"):
                read(QWEN2, rope_parameters=plain, rope_scaling=other)


def test_context_that_scaling_stretches():
    assert read(LLAMA, rope_scaling={"type": "linear", "factor": 2.0}).context_len == 512
    assert read(QWEN2, rope_scaling={"type": "yarn", "factor": 4.0}).context_len == 1024
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert read(QWEN2, rope_scaling=yarn).context_len == 256
    assert read(LLAMA, rope_scaling=LLAMA3).context_len == 256


def test_sliding_windows():
    window = {"use_sliding_window": True, "sliding_window": 8}
    assert read(QWEN2, sliding_window=8).windows == ()
    assert read(QWEN2, **window, max_window_layers=3).windows == (None, None, None, 8)
    assert read(QWEN2, **{**window, "sliding_window": None}).windows == ()
    kinds = ["sliding_attention", "full_attention"] * 2
    spec = read(QWEN2, **window, layer_types=kinds)
    assert spec.windows == (8, None, 8, None)
    groups = group_layers(spec.kv_specs(1))
    assert [(g.spec, g.layers) for g in groups] == [
        (SlidingWindow(1, 16, 8), (0, 2)), (FullAttention(1, 16), (1, 3)),
    ]  # fmt: skip
    assert read(MISTRAL, sliding_window=5).windows == (5,) * 4
    assert read(MISTRAL).windows == ()


BAD = {
    "unknown key": (LLAMA, {"clip_qkv": 3}, "unknown key 'clip_qkv'"),
    "two unknown": (LLAMA, {"b\ud800": 3, "a": 1}, r"unknown keys 'a', 'b\\ud800'"),
    "other family's key": (LLAMA, {"sliding_window": 4}, "unknown key 'sliding_window'"),
    "missing": (LLAMA, {"vocab_size": None}, "'vocab_size' is missing"),
    "type": (LLAMA, {"hidden_size": "64"}, "'hidden_size' is '64', not int"),
    "bool": (LLAMA, {"num_hidden_layers": True}, "'num_hidden_layers' is True, not int"),
    "layers": (LLAMA, {"num_hidden_layers": 10**12}, "num_layers is 1000000000000; limit: 1 to 4096"),
    "zero": (LLAMA, {"intermediate_size": 0}, "intermediate_size is 0"),
    "negative": (LLAMA, {"vocab_size": -5}, "vocab_size is -5"),
    "no heads": (LLAMA, {"num_attention_heads": 0}, "does not split over 0 heads"),
    "no kv heads": (LLAMA, {"num_key_value_heads": 0}, "num_kv_heads is 0"),
    "split": (LLAMA, {"hidden_size": 65}, "hidden_size 65 does not split over 4 heads"),
    "groups": (LLAMA, {"num_key_value_heads": 3}, "4 attention heads do not divide over 3"),
    "odd head": (LLAMA, {"head_dim": 7}, "with head_dim 7"),
    "epsilon": (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "activation": (LLAMA, {"hidden_act": "relu"}, "hidden_act 'relu'; limit: silu"),
    "interleaved": (LLAMA, {"rope_interleaved": True}, "'rope_interleaved' is True"),
    "mrope": (QWEN2, {"use_mrope": True}, "'use_mrope' is True"),
    "rope type": (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope type 'dynamic'; limit: "),
    "rope key": (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 2, "x": 1}}, "unknown key 'x'"),
    "rope list": (LLAMA, {"rope_scaling": [1]}, "not an object"),
    "rope factor": (LLAMA, {"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
    "factor 0": (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0.0"),
    "factor inf": (LLAMA, {"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor is inf"),
    "factor huge": (LLAMA, {"rope_scaling": {"type": "linear", "factor": 10**400}}, "'factor' is 1000"),
    "theta": (LLAMA, {"rope_theta": 0}, "rope parameters"),
    "llama3": (LLAMA, {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor 1.0"),
    "yarn": (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "yarn factor 0.5"),
    "factors": (LLAMA, {"rope_scaling": {"type": "factors", "factors": [1.0]}}, "1 factors; limit: 8"),
    "window": (MISTRAL, {"sliding_window": 0}, "sliding_window is 0"),
    "kinds": (
        QWEN2, {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]}, "and 4 of full"
    ),
    "architecture": (LLAMA, {"architectures": ["GPT9"]}, "architecture 'GPT9' is unknown; limit: .*LlamaForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "message"), BAD.values(), ids=BAD.keys())
def test_names_what_it_cannot_use(base, changes, message):
    with pytest.raises(BadModelFile, match=message) as caught:
        read(base, **changes)
    str(caught.value).encode()
    assert "config.json" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_any_value_in_any_place_is_refused_or_understood():
    """A random value in a random key never gives another exception."""
    rng = random.Random(SEED)
    values = [None, True, -1, 0, 1, 3, 7, 10**30, 0.5, -2.0, float("nan"), float("inf"), "", "x", [], [1], {}, {"a": 1}]
    full = {
        **LLAMA, "head_dim": 16, "rope_theta": 1e4, "attention_bias": True, "hidden_act": "silu", "layer_types": [],
        "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    ropes = [LLAMA3, {"type": "linear", "factor": 2.0}, {"type": "yarn", "factor": 2.0, "mscale": 1, "beta_slow": 2}]
    for _ in range(3000):
        config = copy.deepcopy({**full, "rope_scaling": rng.choice(ropes)})
        config["architectures"] = [rng.choice(["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])]
        where = config if rng.random() < 0.6 else config["rope_scaling"]
        where[rng.choice([k for k in where if k != "architectures"])] = rng.choice(values)
        reader = ConfigReader(config, "config.json")
        try:
            family_of(config["architectures"][0], "config.json").spec(reader)
        except BadModelFile:
            continue
        except Exception as err:
            pytest.fail(f"OCTAVO_SEED={SEED}: {err!r} from {json.dumps(config)}")


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_frequencies_equal_those_of_transformers(kind):
    rng = random.Random(f"{SEED}/{kind}")
    head_dim, theta = rng.choice((16, 64, 128)), rng.choice((1e4, 5e5, 1e6))
    factor, original = rng.uniform(1.5, 16), rng.choice((64, 512, 8192))
    fields = {
        "default": {},
        "linear": {"factor": factor},
        "llama3": {**LLAMA3, "factor": factor, "original_max_position_embeddings": original},
        "yarn": {"factor": factor, "original_max_position_embeddings": original},
    }[kind]
    parameters = {**fields, "rope_type": kind, "rope_theta": theta}
    spec = read({**LLAMA, "hidden_size": 4 * head_dim}, rope_parameters=parameters).rope
    config = transformers.LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters=parameters)
    if kind == "default":
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        expected, scale = rotary.inv_freq, 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[kind](config)
    torch.testing.assert_close(inverse_frequencies(spec).float(), expected, rtol=1e-5, atol=0)
    table = rope_table(spec, 20000)
    assert table.shape == (20000, head_dim)
    angles = 19999 * inverse_frequencies(spec)
    torch.testing.assert_close(table[-1], (torch.cat((angles.cos(), angles.sin())) * scale).float())
