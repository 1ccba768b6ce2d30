"""Which tensors a model needs, of what shape, and where each goes; compared with a checkpoint before any is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.errors import BadModelFile
from octavo.formats.gguf import BLOCK_TYPES
from octavo.formats.mapped import PLAIN_TYPES, TensorInfo
from octavo.models.spec import DecoderSpec, Weight

Shape = tuple[int, ...]
_KV_SCALE = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale")
"""as compressed-tensors, vLLM and ModelOpt name them"""
_HARMLESS = re.compile(r".*\.(rotary_emb\.inv_freq|attn_rot_embd\.weight|attn\.(masked_)?bias)|rope_freqs\.weight")
"""Buffers that old files hold and that follow from the config (rope_freqs has been read with it)."""
_ONE_MODEL = "check that config and weights are of one model"


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint, whole: before tensor parallelism takes a rank's share."""

    tensor: str
    shape: Shape


@dataclass(frozen=True)
class Parameter:
    """One parameter of the decoder: its parts stacked by rows. `shard` as in `Weight`."""

    name: str
    parts: tuple[Part, ...]
    shard: Literal["out", "in", "vocab"] | None


def expected_parameters(spec: DecoderSpec, weights: Iterable[Weight]) -> dict[str, Parameter]:
    """Every parameter of a model of this spec, by name, where the family's `weights` say which tensors feed it."""
    shapes = _shapes(spec)
    parameters: dict[str, Parameter] = {}
    grouped: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.param in shapes:
            grouped.setdefault(weight.param, []).append(weight)
        else:
            assert weight.optional, weight
    assert set(grouped) == set(shapes), set(shapes) ^ set(grouped)
    for param, parts in grouped.items():
        parts.sort(key=lambda w: w.part)
        for i in range(spec.num_layers if "{i}" in param else 1):
            name = param.replace("{i}", str(i))
            tensors = [w.name.replace("{i}", str(i)) for w in parts]
            pairs = tuple(Part(t, s) for t, s in zip(tensors, shapes[param], strict=True))
            parameters[name] = Parameter(name, pairs, parts[0].shard)
    return parameters


def _shapes(spec: DecoderSpec) -> dict[str, tuple[Shape, ...]]:
    """The shapes of each parameter's parts; a parameter that the spec does without is absent."""
    hidden, inner, vocab = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[Shape, ...]] = {
        "embed.weight": ((vocab, hidden),),
        "layers.{i}.attention_norm.weight": ((hidden,),),
        "layers.{i}.qkv.weight": ((q, hidden), (kv, hidden), (kv, hidden)),
        "layers.{i}.o.weight": ((hidden, q),),
        "layers.{i}.mlp_norm.weight": ((hidden,),),
        "layers.{i}.gate_up.weight": ((inner, hidden), (inner, hidden)),
        "layers.{i}.down.weight": ((hidden, inner),),
        "norm.weight": ((hidden,),),
    }
    if spec.qkv_bias:
        shapes["layers.{i}.qkv.bias"] = ((q,), (kv,), (kv,))
    if spec.o_bias:
        shapes["layers.{i}.o.bias"] = ((hidden,),)
    if spec.mlp_bias:
        shapes["layers.{i}.gate_up.bias"] = ((inner,), (inner,))
        shapes["layers.{i}.down.bias"] = ((hidden,),)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = ((vocab, hidden),)
    return shapes


def check_tensors(
    parameters: Mapping[str, Parameter], tensors: Mapping[str, TensorInfo], tied: bool, source: str
) -> None:
    """Raises BadModelFile naming tensors that are missing, surplus, misshapen or of a type that cannot be used.

    With `tied` embeddings an output matrix may lie in the file all the same; the embedding is used for it.
    """
    expected = {part.tensor: part.shape for parameter in parameters.values() for part in parameter.parts}
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise BadModelFile(f"{source}: {_listed(missing)} missing", fix="bring the whole checkpoint")
    harmless = {"lm_head.weight"} if tied else set()
    surplus = [n for n in tensors if n not in expected and n not in harmless and not _HARMLESS.fullmatch(n)]
    if surplus:
        raise BadModelFile(
            f"{source}: {_listed(surplus)} in the file, but not in a model of this config",
            fix=_ONE_MODEL,
        )
    for name, shape in expected.items():
        _check_tensor(tensors[name], name, shape, source)


def kv_scale_tensors(tensors: Mapping[str, TensorInfo], spec: DecoderSpec, source: str) -> dict[int, tuple[str, str]]:
    """Names of the scales that a checkpoint was calibrated to keep keys and values with, by layer.

    Raises BadModelFile where one lacks its partner, stands twice, is for a layer that is not there, or misshapen.
    """
    found: dict[tuple[int, str], str] = {}
    for name in tensors:
        match = _KV_SCALE.fullmatch(name)
        if match is None:
            continue
        key = int(match[1]), match[2]
        if key in found or key[0] >= spec.num_layers:
            raise BadModelFile(
                f"{source}: tensor {name!r} {'stands twice' if key in found else 'is of no layer'}", fix=_ONE_MODEL
            )
        if math.prod(tensors[name].shape) not in (1, spec.num_kv_heads) or tensors[name].type not in PLAIN_TYPES:
            raise BadModelFile(
                f"{source}: tensor {name!r} is {tensors[name].type} {tensors[name].shape}",
                limit=f"one number, or one for each of {spec.num_kv_heads} kv heads", fix=_ONE_MODEL,
            )  # fmt: skip
        found[key] = name
    for layer, which in found:
        if (layer, "kv"[which == "k"]) not in found:
            raise BadModelFile(f"{source}: layer {layer} has only a {which}_scale", fix="bring the whole checkpoint")
    return {layer: (found[layer, "k"], found[layer, "v"]) for layer, which in found if which == "k"}


def _check_tensor(info: TensorInfo, name: str, shape: Shape, source: str) -> None:
    if info.shape != shape:
        raise BadModelFile(
            f"{source}: tensor {name!r} has shape {info.shape}", limit=f"the config asks for {shape}",
            fix=_ONE_MODEL,
        )  # fmt: skip
    usable = PLAIN_TYPES + BLOCK_TYPES if len(shape) > 1 else PLAIN_TYPES
    if info.type not in usable:
        raise BadModelFile(
            f"{source}: tensor {name!r} is {info.type}", limit=f"one of {', '.join(usable)}",
            fix="use another quantization of this model",
        )  # fmt: skip


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name[:200]) for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more} {'are' if len(names) > 1 else 'is'}"
