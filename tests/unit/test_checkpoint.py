"""Opening checkpoints: what is wrong with a directory, a config or the tensors is named before any is read."""

import json
import random
import subprocess
import sys

import gguf
import numpy as np
import pytest
import safetensors.numpy

from octavo.errors import BadModelFile
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_config import interleaved_rows
from tests.matrix import SEED

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


def tensors() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (8,), layer + "post_attention_layernorm.weight": (8,),
            layer + "self_attn.q_proj.weight": (8, 8), layer + "self_attn.k_proj.weight": (4, 8),
            layer + "self_attn.v_proj.weight": (4, 8), layer + "self_attn.o_proj.weight": (8, 8),
            layer + "mlp.gate_proj.weight": (12, 8), layer + "mlp.up_proj.weight": (12, 8),
            layer + "mlp.down_proj.weight": (8, 12),
        }  # fmt: skip
    shapes["lm_head.weight"] = (20, 8)
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def write(directory, config=CONFIG, weights=None, **changes):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    safetensors.numpy.save_file(tensors() if weights is None else weights, directory / "model.safetensors")
    return directory


def refused(path, message: str) -> BadModelFile:
    with pytest.raises(BadModelFile, match=message) as caught:
        open_checkpoint(path)
    said = str(caught.value)
    assert str(path) in said
    assert "fix:" in said
    assert "\n" not in said
    return caught.value


def test_facts(tmp_path):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 7], "temperature": 0.6}))
    checkpoint = open_checkpoint(str(tmp_path))
    facts = checkpoint.facts()
    assert (facts.path, facts.context_len, facts.vocab_size) == (str(tmp_path), 64, 20)
    assert facts.eos_token_ids == (5, 2, 7)
    assert checkpoint.generation_config["temperature"] == 0.6
    assert checkpoint.tensors["lm_head.weight"].shape == (20, 8)


def test_no_end_token_at_all(tmp_path):
    assert open_checkpoint(write(tmp_path, eos_token_id=None)).eos_token_ids == ()


def test_opening_needs_no_torch(tmp_path):
    write(tmp_path)
    program = (
        "import sys; from octavo.models.checkpoint import open_checkpoint; "
        "open_checkpoint(sys.argv[1]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60).returncode == 0


def test_paths_that_are_no_model(tmp_path):
    refused(tmp_path / "none", "no such file or directory")
    refused(tmp_path, "neither config.json nor a GGUF file")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "no safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert "convert them to safetensors" in str(refused(tmp_path, "pytorch_model.bin: pickled"))
    refused(tmp_path / "pytorch_model.bin", "pickled")
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path, "Git LFS pointer")
    refused(tmp_path / "model.safetensors", "weights without a config")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json is not valid JSON")


CONFIGS = {
    "architecture": ({"architectures": ["T5ForConditionalGeneration"]}, "'T5ForConditionalGeneration' is unknown"),
    "no architecture": ({"architectures": None}, "architectures is None"),
    "two": ({"architectures": ["LlamaForCausalLM", "X"]}, "a list of one name"),
    "key": ({"logit_scale": 3}, "unknown key 'logit_scale'"),
    "quantization": ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq' is not supported"),
    "eos kind": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    "eos range": ({"eos_token_id": [2, 20]}, "end-of-sequence token 20; limit: vocabulary of 20"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIGS.values(), ids=CONFIGS.keys())
def test_configs_it_cannot_use(tmp_path, changes, message):
    refused(write(tmp_path, **changes), message)


def test_missing_tensors_are_named(tmp_path):
    weights = tensors()
    del weights["model.layers.1.mlp.up_proj.weight"]
    refused(write(tmp_path, weights=weights), r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing")
    refused(write(tmp_path, weights={"x": np.zeros(1)}), r"'model\.embed_tokens\.weight', .* and 16 more are missing")


def test_surplus_tensors_are_named(tmp_path):
    weights = tensors() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(8, np.float32)}
    refused(write(tmp_path, weights=weights), r"tensor 'model\.layers\.0\.self_attn\.q_proj\.bias' is in the file, but")
    refused(write(tmp_path, num_hidden_layers=1), r"tensors 'model\.layers\.1\.input.*and 4 more are in the file")


def test_misshapen_tensors_are_named_with_both_shapes(tmp_path):
    message = r"tensor 'model\.layers\.0\.mlp\.gate_proj\.weight' has shape \(12, 8\); limit: .*\(13, 8\)"
    refused(write(tmp_path, intermediate_size=13), message)


def test_tensors_of_unusable_types_are_named(tmp_path):
    weights = tensors()
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.int32)
    refused(write(tmp_path, weights=weights), r"tensor 'model\.norm\.weight' is I32; limit: one of F32, F16, BF16")


def test_buffers_that_follow_from_the_config_do_no_harm(tmp_path):
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    open_checkpoint(write(tmp_path, weights=tensors() | buffers))


def test_tied_embeddings_with_and_without_an_output_matrix(tmp_path):
    weights = tensors()
    write(tmp_path, weights=weights, tie_word_embeddings=True)
    assert "lm_head.weight" not in open_checkpoint(tmp_path).parameters
    del weights["lm_head.weight"]
    write(tmp_path, weights=weights, tie_word_embeddings=True)
    open_checkpoint(tmp_path)
    refused(write(tmp_path, weights=weights), "tensor 'lm_head.weight' is missing")


METADATA = {
    "llama.context_length": 64, "llama.block_count": 1, "llama.embedding_length": 8, "llama.feed_forward_length": 12,
    "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1, "llama.rope.dimension_count": 4,
}  # fmt: skip
GGUF_SHAPES = {
    "token_embd.weight": (20, 8), "blk.0.attn_norm.weight": (8,), "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (4, 8), "blk.0.attn_v.weight": (4, 8), "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_norm.weight": (8,), "blk.0.ffn_gate.weight": (12, 8), "blk.0.ffn_up.weight": (12, 8),
    "blk.0.ffn_down.weight": (8, 12), "output_norm.weight": (8,),
}  # fmt: skip


def write_gguf(path, arch="llama", metadata=METADATA, arrays=None, **more):
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**metadata, **more}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, array in ({n: np.zeros(s, np.float32) for n, s in GGUF_SHAPES.items()} | (arrays or {})).items():
        if array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_in_a_directory(tmp_path):
    write_gguf(tmp_path / "a.gguf", **{"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 4})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.facts().eos_token_ids == (3, 4)
    assert checkpoint.spec.tie_embeddings
    assert checkpoint.spec == open_checkpoint(tmp_path / "a.gguf").spec
    write_gguf(tmp_path / "b.gguf")
    assert "a.gguf" in str(refused(tmp_path, "2 GGUF files"))


def test_a_generation_config_beside_a_gguf_file(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", **{"tokenizer.ggml.eos_token_id": 3})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3], "top_p": 0.9}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.generation_config["top_p"] == 0.9
    assert checkpoint.eos_token_ids == (5, 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(BadModelFile, match=r"generation_config\.json: eos_token_id is '</s>'"):
        open_checkpoint(path)


GGUF_METADATA = {
    "architecture": ({"arch": "rwkv6"}, "architecture 'rwkv6' is unknown; limit: llama, qwen2"),
    "key": ({"llama.attention.clamp_kqv": 1}, "unknown key 'attention.clamp_kqv'"),
    "experts": ({"llama.expert_count": 8}, "'expert_count' is 8"),
    "missing": ({"llama.block_count": None}, "'block_count' is missing"),
    "rotary": ({"llama.rope.dimension_count": 2}, "'rope.dimension_count' is 2"),
    "split": ({"split.count": 2}, "'split.count' is 2.*join the parts"),
    "adapter": ({"general.type": "adapter"}, "'general.type' is 'adapter'"),
    "vocabulary": ({"llama.vocab_size": 21}, "20 rows in token_embd.weight; limit: vocab_size is 21"),
    "eos": ({"tokenizer.ggml.eos_token_id": 20}, "end-of-sequence token 20"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, "rope type 'longrope'"),
    "heads": ({"llama.attention.head_count": 0}, "attention.head_count is 0; limit: at least 1"),
    "layers": ({"llama.block_count": 2}, r"'model\.layers\.1\.input_layernorm\.weight', .* are missing"),
}


@pytest.mark.parametrize(("changes", "message"), GGUF_METADATA.values(), ids=GGUF_METADATA.keys())
def test_gguf_metadata_it_cannot_use(tmp_path, changes, message):
    refused(write_gguf(tmp_path / "a.gguf", **changes), message)


GGUF_TENSORS = {
    "no embedding": ({"token_embd.weight": None}, "no tensor token_embd.weight"),
    "surplus": ({"blk.0.attn_q_norm.weight": np.zeros(4, np.float32)}, "'blk.0.attn_q_norm.weight' is in the file"),
    "twice": ({"model.norm.weight": np.zeros(8, np.float32)}, "'model.norm.weight' stands twice"),
    "shape": ({"blk.0.attn_k.weight": np.zeros((8, 8), np.float32)}, r"shape \(8, 8\); limit: .*\(4, 8\)"),
    "integers": ({"blk.0.attn_k.weight": np.zeros((4, 8), np.int32)}, "is I32; limit: one of F32, F16, BF16, Q4_0"),
    "factors": ({"rope_freqs.weight": np.ones(3, np.float32)}, "3 factors; limit: 2"),
    "factors kind": ({"rope_freqs.weight": np.ones(2, np.float16)}, r"rope_freqs.weight is F16 \(2,\)"),
    "factor 0": ({"rope_freqs.weight": np.zeros(2, np.float32)}, "rope parameters"),
}


@pytest.mark.parametrize(("arrays", "message"), GGUF_TENSORS.values(), ids=GGUF_TENSORS.keys())
def test_gguf_tensors_it_cannot_use(tmp_path, arrays, message):
    refused(write_gguf(tmp_path / "a.gguf", arrays=arrays), message)


def test_interleaved_rows_are_put_back_in_order():
    """Two heads of six channels, as llama.cpp's converter would have written them."""
    file_rows = np.arange(12).reshape(2, 2, 3).swapaxes(1, 2).reshape(12)
    assert file_rows[interleaved_rows(12, 2)].tolist() == list(range(12))


@pytest.mark.parametrize("form", ["a.gguf", "config.json", "model.safetensors.index.json"])
def test_flipped_bytes_never_surprise(tmp_path, form):
    """BadModelFile or success, whatever bytes of metadata, config or index are wrong."""
    rng = random.Random(f"{SEED}/{form}")
    if form == "a.gguf":
        write_gguf(tmp_path / form, **{"tokenizer.ggml.eos_token_id": 3, "llama.rope.scaling.type": "linear"})
    else:
        write(tmp_path, rope_scaling={"type": "yarn", "factor": 2.0}, head_dim=4)
    if form == "model.safetensors.index.json":
        (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
        (tmp_path / form).write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "part.safetensors")}))
    open_checkpoint(tmp_path)
    content = (tmp_path / form).read_bytes()
    end = min(len(content), 3000)
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(end)] = rng.choice((rng.randrange(256), *b'019,:[]{}"e-'))
        (tmp_path / form).write_bytes(changed)
        try:
            open_checkpoint(tmp_path)
        except BadModelFile as err:
            str(err).encode()
        except Exception as err:
            pytest.fail(f"OCTAVO_SEED={SEED}: {err!r}")
