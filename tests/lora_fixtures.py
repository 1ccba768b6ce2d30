"""Random LoRA adapters in PEFT's files, and the same adapters merged into a `transformers` model."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.models.checkpoint import open_checkpoint

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MODULES = ATTENTION + MLP


def write_adapter(
    folder: Path, model: torch.nn.Module | Path, seed: int, *, targets: tuple[str, ...] = MODULES, rank: int = 4,
    dtype: torch.dtype = torch.float32, strength: float = 0.5, **config: Any,
) -> Path:  # fmt: skip
    """An adapter of `model` (or of that checkpoint) with random A and B; `config` adds to adapter_config.json.

    Its product is about `strength` times as large as the weights of `tests.models_fixtures`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **config}
    tensors = {}
    for name, (rows, columns) in linears(model).items():
        if name.rsplit(".", 1)[1] not in targets:
            continue
        r, scale = rank_and_scale(fields, name)
        a = torch.randn(r, columns, generator=generator) * columns**-0.5
        b = torch.randn(rows, r, generator=generator) * r**-0.5 * strength / scale
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def linears(model: torch.nn.Module | Path) -> dict[str, tuple[int, int]]:
    """Shapes of the layers' linears, by name in the checkpoint."""
    if isinstance(model, Path):
        tensors = {name: info.shape for name, info in open_checkpoint(model).tensors.items()}
    else:
        tensors = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {
        name.removesuffix(".weight"): shape for name, shape in tensors.items() if ".layers." in name and len(shape) == 2
    }


def rank_and_scale(fields: dict[str, Any], name: str) -> tuple[int, float]:
    """By PEFT's rules, for patterns that are ends of names."""

    def chosen(pattern: str, default: Any) -> Any:
        return next((v for end, v in fields.get(pattern, {}).items() if f".{name}".endswith(f".{end}")), default)

    rank, alpha = chosen("rank_pattern", fields["r"]), chosen("alpha_pattern", fields["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def merged(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """A copy of the model with scale * B A added to its weights, in float32."""
    from safetensors.torch import load_file

    fields, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    made = copy.deepcopy(model)
    modules = dict(made.named_modules())
    with torch.no_grad():
        for key, a in tensors.items():
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            if name == key.removeprefix("base_model.model."):
                continue
            b = tensors[key.replace("lora_A", "lora_B")]
            modules[name].weight += rank_and_scale(fields, name)[1] * (b.float() @ a.float())
    return made


def damage(folder: Path, rng: random.Random, kind: str) -> None:
    """Spoils an adapter in a way that `kind` names."""
    from safetensors.torch import load_file

    path = folder / "adapter_model.safetensors"
    config = json.loads((folder / "adapter_config.json").read_text())
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[: -rng.randint(1, 1000)])
        return
    if kind == "no weights":
        path.unlink()
        return
    if kind == "no config":
        (folder / "adapter_config.json").unlink()
        return
    if kind == "pickle":
        path.rename(folder / "adapter_model.bin")
        return
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    if kind == "shape":
        tensors[name] = torch.cat((tensors[name], tensors[name]), dim=rng.randrange(2))
    elif kind == "missing":
        del tensors[name]
    elif kind == "missing module":
        for half in ("lora_A", "lora_B"):
            tensors.pop(name.replace("lora_A", half).replace("lora_B", half))
    elif kind == "nan":
        tensors[name].view(-1)[rng.randrange(tensors[name].numel())] = rng.choice((math.nan, math.inf))
    elif kind == "surplus":
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(1, 1)
    elif kind == "integers":
        tensors[name] = tensors[name].to(torch.int32)
    else:
        config.update(json.loads(kind))
    save_file(tensors, path)
    (folder / "adapter_config.json").write_text(json.dumps(config))
