"""A checkpoint on disk: what the model is, and its tensors under their Hugging Face names. No torch.

Opening reads headers only, and compares every tensor with what the config asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config import ModelFacts
from octavo.errors import BadModelFile
from octavo.formats.gguf import GGUFFile, read_gguf
from octavo.formats.mapped import TensorFile, TensorInfo, map_file
from octavo.formats.safetensors import parse_json, read_checkpoint_files
from octavo.models import gguf_config
from octavo.models.parameters import Parameter, check_tensors, expected_parameters, kv_scale_tensors
from octavo.models.registry import architecture_of_gguf, family_of
from octavo.models.spec import ConfigReader, DecoderSpec

MAX_JSON_BYTES = 16 << 20
GENERATION_CONFIG = "generation_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, with the heads whose rows llama.cpp has interleaved (0: rows are in order)."""

    file: TensorFile
    name: str
    interleaved_heads: int = 0


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    config: Mapping[str, Any]
    """as config.json has it; for GGUF, as it would be"""
    spec: DecoderSpec
    generation_config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    tensors: Mapping[str, TensorInfo]
    """by Hugging Face name"""
    parameters: Mapping[str, Parameter]
    """what the decoder is made of, checked against `tensors`"""
    stored: Mapping[str, StoredTensor]
    kv_scales: Mapping[int, tuple[str, str]]
    """by layer, the names of the tensors that keys and values are to be scaled with in an fp8 KV cache"""

    def facts(self) -> ModelFacts:
        return ModelFacts(str(self.path), self.spec.context_len, self.spec.vocab_size, self.eos_token_ids)

    def with_generation_config(self, folder: Path) -> Checkpoint:
        """With the generation_config.json of another folder; its end-of-sequence tokens are added to those known.

        Raises BadModelFile.
        """
        config, eos = _read_generation_config(folder)
        _check_eos(eos, self.spec.vocab_size, str(folder))
        unique = tuple(dict.fromkeys(eos + self.eos_token_ids))
        return replace(self, generation_config=config, eos_token_ids=unique)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Rows of a tensor as bytes of its own type: uint8 [stop - start, bytes a row], in Hugging Face order.

        Not writable; a view of the file unless rows had to be reordered.
        """
        stored = self.stored[name]
        info = stored.file.tensors[stored.name]
        data = stored.file.data(stored.name).reshape(info.shape[0], -1)
        if stored.interleaved_heads:
            return data[gguf_config.interleaved_rows(info.shape[0], stored.interleaved_heads)[start:stop]]
        return data[start:stop]


def open_checkpoint(path: Path | str, weights: bool = True) -> Checkpoint:
    """Opens a directory with config.json and safetensors, a directory with one GGUF file, or a GGUF file.

    A generation_config.json in the directory, or beside the GGUF file, is read too. Without `weights`, a directory with
    config.json need not hold any, and those that are there are not looked at: `tensors` and `stored` are empty then.
    Raises BadModelFile naming what is missing, unknown, or does not fit together.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix in _PICKLES:
            raise _pickle(path)
        if path.suffix == ".safetensors":
            raise BadModelFile(f"{path}: weights without a config", fix="give the directory that holds config.json")
        return _open_gguf(path)
    if not path.is_dir():
        raise BadModelFile(f"{path}: no such file or directory", fix="check the path")
    files = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() and (not files or any(path.glob("*.safetensors*"))):
        return _open_directory(path, weights)
    if len(files) == 1:
        return _open_gguf(files[0])
    if files:
        raise BadModelFile(f"{path}: {len(files)} GGUF files", fix=f"name one of them, such as {files[0].name}")
    raise BadModelFile(f"{path}: neither config.json nor a GGUF file", fix="give the directory of a model")


def _open_directory(path: Path, weights: bool) -> Checkpoint:
    config = _read_json(path / "config.json")
    source = str(path / "config.json")
    quantization = config.get("quantization_config")
    if quantization is not None and not _only_of_kv_cache(quantization):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise BadModelFile(
            f"{source}: quantization {str(method)[:100]!r} is not supported",
            fix="use the model without quantization, or its GGUF form",
        )
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise BadModelFile(f"{source}: architectures is {repr(names)[:100]}", limit="a list of one name", fix=_OWN)
    pickles = [p for p in sorted(path.iterdir()) if p.suffix in _PICKLES]
    if weights and pickles and not any(path.glob("*.safetensors*")):
        raise _pickle(pickles[0])
    generation_config, generation_eos = _read_generation_config(path)
    stored: dict[str, StoredTensor] | None = None
    if weights:
        stored = {name: StoredTensor(file, name) for file in read_checkpoint_files(path) for name in file.tensors}
    eos = generation_eos + _ids(config, source)
    return _checkpoint(path, config, generation_config, eos, stored, source)


def _only_of_kv_cache(quantization: Any) -> bool:
    """True for compressed-tensors that left the weights alone and calibrated scales for keys and values in fp8."""
    if not isinstance(quantization, dict) or quantization.get("config_groups"):
        return False
    scheme = quantization.get("kv_cache_scheme")
    wanted = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}
    return (
        quantization.get("quant_method") == "compressed-tensors"
        and isinstance(scheme, dict)
        and all(scheme.get(key) == value for key, value in wanted.items())
    )


def _read_generation_config(folder: Path) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The settings, and the end-of-sequence tokens among them; nothing where the folder has none."""
    path = folder / GENERATION_CONFIG
    config = _read_json(path) if path.exists() else {}
    return config, _ids(config, str(path))


def _check_eos(eos_token_ids: tuple[int, ...], vocab_size: int, source: str) -> None:
    for token in eos_token_ids:
        if not 0 <= token < vocab_size:
            raise BadModelFile(
                f"{source}: end-of-sequence token {token}", limit=f"vocabulary of {vocab_size}", fix=_OWN
            )


_OWN = "use the model's own file"


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    architecture = ConfigReader(file.metadata, str(path)).get("general.architecture", str)
    name = architecture_of_gguf(architecture, str(path))
    family = family_of(name, str(path))
    config = {**gguf_config.hf_config(file, name), **family.gguf_settings(file.tensors)}
    stored = _stored_gguf(file, config, family.gguf_interleaved_rope)
    generation_config, generation_eos = _read_generation_config(path.parent)
    eos = generation_eos + gguf_config.eos_token_ids(file)
    return _checkpoint(path, config, generation_config, eos, stored, str(path))


def _stored_gguf(file: GGUFFile, config: Mapping[str, Any], interleaved: bool) -> dict[str, StoredTensor]:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]} if interleaved else {}
    stored: dict[str, StoredTensor] = {}
    for name in file.tensors:
        hf_name = gguf_config.hf_name(name)
        if hf_name in stored:
            raise BadModelFile(f"{file.path}: tensor {hf_name!r} stands twice", fix="convert the model again")
        module = hf_name.rsplit(".", 2)[-2] if hf_name.count(".") > 1 else ""
        stored[hf_name] = StoredTensor(file, name, heads.get(module, 0))
    return stored


def _checkpoint(
    path: Path,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    eos_token_ids: tuple[int, ...],
    stored: Mapping[str, StoredTensor] | None,
    source: str,
) -> Checkpoint:
    """`stored` None: the weights are not here, and nobody will ask for them."""
    family = family_of(config["architectures"][0], source)
    reader = ConfigReader(config, source)
    reader.ignore("quantization_config")
    spec = family.spec(reader)
    reader.finish()
    _check_eos(eos_token_ids, spec.vocab_size, source)
    parameters = expected_parameters(spec, family.weights)
    tensors = {name: s.file.tensors[s.name] for name, s in (stored or {}).items()}
    kv_scales = kv_scale_tensors(tensors, spec, str(path))
    if stored is not None:
        scales = {name for pair in kv_scales.values() for name in pair}
        weights = {name: info for name, info in tensors.items() if name not in scales}
        check_tensors(parameters, weights, spec.tie_embeddings, str(path))
    unique = tuple(dict.fromkeys(eos_token_ids))
    return Checkpoint(path, config, spec, generation_config, unique, tensors, parameters, stored or {}, kv_scales)


def _read_json(path: Path) -> dict[str, Any]:
    raw = map_file(path)
    if len(raw) > MAX_JSON_BYTES:
        raise BadModelFile(f"{path}: {len(raw)} bytes", limit=f"{MAX_JSON_BYTES} bytes", fix=_OWN)
    return parse_json(raw[:], str(path))


def _ids(config: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """`eos_token_id`: absent, one id or a list of ids."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise BadModelFile(f"{source}: eos_token_id is {repr(value)[:100]}", limit="an id or a list of ids", fix=_OWN)
    return tuple(ids)


def _pickle(path: Path) -> BadModelFile:
    return BadModelFile(
        f"{path}: pickled weights, which can run any code when they are read and are never read here",
        fix="convert them to safetensors",
    )
