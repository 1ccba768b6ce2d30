"""Adapters on the reference operations give the logits of the merged model, and those of `peft`."""

from __future__ import annotations

import json
import random
from itertools import combinations

import pytest
import torch

from octavo.errors import OctavoError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.loader import load_model
from octavo.models.lora import open_adapter
from octavo.models.lora_loader import AdapterLoader
from tests.lora_fixtures import ATTENTION, MLP, MODULES, damage, merged, write_adapter
from tests.matrix import SEED, sample
from tests.models_fixtures import expected_logits, random_model, save
from tests.paged_decoder import paged_logits, random_prompts, reference_device

FAMILIES = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen2": {}, "mistral": {"sliding_window": 9}}
TARGETS = {"+".join(names): names for size in (1, 2, 3, 4, 7) for names in combinations(MODULES, size)}
CONFIGS = {
    "plain": {}, "rslora": {"use_rslora": True}, "alpha": {"lora_alpha": 3.5},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 7, "mlp.up_proj": 2, "v_proj": 1},
        "alpha_pattern": {"model.layers.0.self_attn.k_proj": 5, "gate_proj": 0.25},
    },
}  # fmt: skip
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
CASES = [(f, t, c, d) for f in FAMILIES for t in TARGETS for c in CONFIGS for d in DTYPES]


def loaded(path, *adapters):
    """A decoder with adapters 1, 2, … in it, and its device."""
    device, checkpoint = reference_device(), open_checkpoint(path)
    decoder = load_model(checkpoint, device, torch.float32)
    loader = AdapterLoader(decoder, checkpoint.parameters, device, torch.float32, decoder.embed.group)
    for number, folder in enumerate(adapters, 1):
        loader.load(number, open_adapter(folder, checkpoint.parameters, 64))
    return decoder, device, loader


@pytest.mark.parametrize("case", sample(CASES, 24), ids="-".join)
def test_logits_equal_those_of_the_merged_model(case, tmp_path):
    family, targets, config, dtype = case
    rng = random.Random(f"{SEED}/{case}")
    model = save(random_model(family, rng.randrange(1 << 30), **FAMILIES[family]), tmp_path, torch.float32, False)
    first = write_adapter(
        tmp_path / "one", model, rng.randrange(1 << 30), targets=TARGETS[targets], dtype=DTYPES[dtype],
        rank=rng.choice((1, 4, 64)), **CONFIGS[config],
    )  # fmt: skip
    second = write_adapter(tmp_path / "two", model, rng.randrange(1 << 30), rank=3)
    decoder, device, _ = loaded(tmp_path, first, second)
    prompts = random_prompts(rng, 97)
    numbers = tuple(rng.sample((0, 1, 2), 3))
    models = [model, merged(model, first), merged(model, second)]
    for number, prompt, ours in zip(
        numbers, prompts, paged_logits(decoder, device, prompts, rng, numbers), strict=True
    ):
        theirs = expected_logits(models[number], [prompt])[0]
        torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=1e-4, msg=lambda m: f"OCTAVO_SEED={SEED}: {m}")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.filterwarnings("ignore:.* keys did not match any targeted module:RuntimeWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_peft(family, tmp_path):
    import peft

    rng = random.Random(f"{SEED}/peft/{family}")
    model = save(random_model(family, rng.randrange(1 << 30), **FAMILIES[family]), tmp_path, torch.float32, False)
    settings = {
        "target_modules": rng.choice(["all-linear", list(ATTENTION), list(MLP), r".*\.(q|down)_proj", ["v_proj"]]),
        "r": rng.choice((2, 8, 16)), "lora_alpha": rng.choice((2, 6)), "use_rslora": rng.random() < 0.5,
        "rank_pattern": {"q_proj": 3, "^model.layers.1.mlp.down_proj": 6},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 4},
        "init_lora_weights": False, "layers_to_transform": rng.choice((None, [0, 2], 1)), "lora_dropout": 0.1,
    }  # fmt: skip
    if isinstance(settings["target_modules"], str):
        settings["layers_to_transform"] = None  # peft refuses both
    torch.manual_seed(rng.randrange(1 << 30))
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    decoder, device, _ = loaded(tmp_path, tmp_path / "adapter")
    prompts = random_prompts(rng, 97)
    shown = f"OCTAVO_SEED={SEED}, {settings}"
    for prompt, ours in zip(prompts, paged_logits(decoder, device, prompts, rng, (1, 1, 1)), strict=True):
        theirs = expected_logits(adapted, [prompt])[0]
        torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=1e-4, msg=lambda m: f"{shown}: {m}")


def test_an_unloaded_adapter_leaves_the_base_model(tmp_path):
    rng = random.Random(f"{SEED}/unload")
    model = save(random_model("llama", rng.randrange(1 << 30)), tmp_path, torch.float32, False)
    decoder, device, loader = loaded(tmp_path, write_adapter(tmp_path / "one", model, rng.randrange(1 << 30)))
    prompts = random_prompts(rng, 97)
    assert all(linear.loaded for linear in loader.linears.values())
    loader.unload(1)
    assert not any(linear.loaded for linear in loader.linears.values())
    for prompt, ours in zip(prompts, paged_logits(decoder, device, prompts, rng), strict=True):
        torch.testing.assert_close(ours, expected_logits(model, [prompt])[0], atol=2e-4, rtol=1e-4)


DAMAGES = {
    "truncated": "truncated|not safetensors|end",
    "no weights": "no adapter is at .*adapter_model.safetensors is missing",
    "no config": "no adapter is at .*adapter_config.json is missing", "pickle": "pickled weights",
    "shape": r"has shape \(.*limit: \(.* from rank 4 and this model", "missing": "tensor .* is missing",
    "missing module": "target_modules asks for model.layers.*tensors are missing",
    "nan": "holds NaN, infinity", "surplus": "'base_model.model.lm_head.lora_A.weight' is not of a LoRA adapter",
    "integers": "is I32", '{"r": 5}': "has shape", '{"r": 0}': "a rank is 0", '{"r": "4"}': "'r' is '4', not int",
    '{"r": null}': "'r' is missing", '{"lora_alpha": null}': "'lora_alpha' is missing",
    '{"use_dora": true}': "'use_dora' is True, which Octavo does not support",
    '{"bias": "all"}': "'bias' is 'all'", '{"modules_to_save": ["lm_head"]}': "'modules_to_save' is",
    '{"fan_in_fan_out": true}': "'fan_in_fan_out'", '{"init_lora_weights": "pissa"}': "'init_lora_weights' is 'pissa'",
    '{"peft_type": "IA3"}': "'peft_type' is 'IA3'", '{"no_such_key": 1}': "unknown key 'no_such_key'",
    '{"layer_replication": [[0, 2]]}': "'layer_replication'", '{"use_rslora": 1}': "'use_rslora' is 1",
    '{"target_modules": ["q_proj", "c_attn"]}': "names 'c_attn', which cannot be adapted in this model",
    '{"target_modules": {"q": 1}}': "target_modules is", '{"rank_pattern": {"(q|k)_proj": 3}}': "is an expression",
    '{"rank_pattern": {"q_proj": true}}': "'q_proj' is True", '{"alpha_pattern": {"q_proj": NaN}}': "lora_alpha is nan",
    '{"lora_alpha": 1e300}': "holds NaN, infinity, or more", '{"exclude_modules": 3}': "exclude_modules is 3",
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_bad_adapter_is_one_line_and_changes_nothing(kind, tmp_path):
    rng = random.Random(f"{SEED}/{kind}")
    model = save(random_model("llama", rng.randrange(1 << 30)), tmp_path, torch.float32, False)
    _, _, loader = loaded(tmp_path)
    folder = write_adapter(tmp_path / "bad", model, rng.randrange(1 << 30))
    damage(folder, rng, kind)
    with pytest.raises(OctavoError, match=DAMAGES[kind]) as bad:
        loader.load(1, open_adapter(folder, loader.parameters, 64))
    assert "\n" not in str(bad.value) and 400 <= bad.value.status < 500, str(bad.value)
    assert not any(linear.loaded for linear in loader.linears.values())


def test_another_model_s_adapter_is_refused(tmp_path):
    small = save(random_model("llama", 1), tmp_path, torch.float32, False)
    large = random_model("llama", 2, hidden_size=64, num_hidden_layers=4)
    _, _, loader = loaded(tmp_path)
    for model, targets, said in ((large, MODULES, "layers.3.* is not of a LoRA"), (small, ("lm_head",), "no tensors")):
        folder = write_adapter(tmp_path / said[:5], model, 3, targets=targets)
        with pytest.raises(OctavoError, match=said):
            open_adapter(folder, loader.parameters, 64)
    with pytest.raises(OctavoError, match="rank is 9; limit: --max-lora-rank 8"):
        open_adapter(write_adapter(tmp_path / "high", small, 3, rank=9), loader.parameters, 8)


def test_paths_and_sizes_that_cannot_be_are_refused_before_they_are_read(tmp_path):
    model = save(random_model("llama", 1), tmp_path, torch.float32, False)
    _, _, loader = loaded(tmp_path)
    with pytest.raises(OctavoError, match="cannot be read: File name too long"):
        open_adapter(tmp_path / ("x" * 300), loader.parameters, 64)
    folder = write_adapter(tmp_path / "one", model, 3)
    with (folder / "adapter_model.safetensors").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(OctavoError, match=r"has 1099511627776 bytes; limit: [0-9]+ bytes for this model at --max-lora"):
        open_adapter(folder, loader.parameters, 64)
    (folder / "adapter_config.json").write_text(" " * (2 << 20))
    with pytest.raises(OctavoError, match=r"adapter_config.json is too large; limit: 1048576 bytes"):
        open_adapter(folder, loader.parameters, 64)


def test_a_loaded_adapter_does_not_depend_on_its_files(tmp_path):
    """They may be written anew, or cut, while it is in use or being read."""
    model = save(random_model("llama", 1), tmp_path, torch.float32, False)
    folder = write_adapter(tmp_path / "one", model, 3)
    decoder, device, loader = loaded(tmp_path)
    adapter = open_adapter(folder, loader.parameters, 64)
    expected = merged(model, folder)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    loader.load(1, adapter)
    prompts = random_prompts(random.Random(SEED), 97)
    for prompt, ours in zip(prompts, paged_logits(decoder, device, prompts, random.Random(1), (1,) * 3), strict=True):
        torch.testing.assert_close(ours, expected_logits(expected, [prompt])[0], atol=5e-4, rtol=1e-4)


def test_the_digest_tells_contents_apart(tmp_path):
    model = save(random_model("llama", 1), tmp_path, torch.float32, False)
    _, _, loader = loaded(tmp_path)
    folder = write_adapter(tmp_path / "one", model, 3)
    same = write_adapter(tmp_path / "same", model, 3)
    other = write_adapter(tmp_path / "other", model, 4)
    scaled = write_adapter(tmp_path / "scaled", model, 3)
    config = json.loads((scaled / "adapter_config.json").read_text())
    (scaled / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 9}))
    digests = [open_adapter(f, loader.parameters, 64).digest for f in (folder, same, other, scaled)]
    assert digests[0] == digests[1] and len(set(digests)) == 3 and all(len(d) == 32 for d in digests)
