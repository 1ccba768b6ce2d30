"""Low-rank adapters (LoRA, arXiv:2106.09685) as PEFT saves them: read and compared with the model, no weight yet. No
torch.

An adapted linear computes W x + scale * B (A x), A being [rank, K] and B [N, rank].
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from octavo.errors import BadModelFile, ModelNotFound
from octavo.formats.mapped import PLAIN_TYPES, TensorFile
from octavo.formats.safetensors import MAX_HEADER_BYTES, parse_json, read_safetensors
from octavo.formats.text_file import usable
from octavo.models.parameters import Parameter, Part
from octavo.models.spec import ConfigReader

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_PICKLE_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."
_OTHER = "use an adapter that was made for this model"
_FIX = "train or export it as a plain LoRA adapter"

IGNORED = (
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "task_type",
    "lora_dropout", "runtime_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "ensure_weight_tying",
)  # fmt: skip
"""Keys that change nothing here: bookkeeping, training, and settings of what `_UNSUPPORTED` refuses. Whether the
adapter was made for this model shows in its shapes."""
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,), "bias": ("none",), "lora_bias": (False,), "fan_in_fan_out": (False,),
    "modules_to_save": ([],), "trainable_token_indices": ([], {}), "target_parameters": ([],),
    "layer_replication": ([],), "use_qalora": (False,), "use_bdlora": (False,), "megatron_config": ({},),
    "alora_invocation_tokens": ([],), "velora_config": (), "monteclora_config": (), "arrow_config": (),
    "kasa_config": (), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip
"""What PEFT can do and we cannot, with the values that ask for nothing. Other ways of `init_lora_weights` (pissa,
olora, corda, loftq, …) change the base model's own weights, too."""


@dataclass(frozen=True)
class Target:
    """One adapted tensor: a part of a parameter of the decoder."""

    part: int
    rank: int
    scale: float
    a: str
    b: str
    """names in the file of A and B"""


@dataclass(frozen=True)
class AdapterFile:
    """An adapter on disk whose header fits the model."""

    path: Path
    digest: bytes
    """SHA-256 over config and weights: what depends on the adapter's content is keyed by it"""
    rank: int
    """the highest of its targets"""
    targets: Mapping[str, tuple[Target, ...]]
    """by parameter name, parts in order"""
    file: TensorFile


def open_adapter(path: Path | str, parameters: Mapping[str, Parameter], max_rank: int) -> AdapterFile:
    """Reads config and header of the adapter in a folder, for a model of these parameters.

    Raises ModelNotFound when there is none, UsageError for a path that cannot be read, BadModelFile for one that is
    damaged, made for another model, of too high a rank, or of a kind that Octavo does not compute.
    """
    path, modules = Path(path), _modules(parameters)
    with usable(str(path), "lora_path"):
        raw = _read_config(path)
        _check_size(path / WEIGHTS_NAME, modules, max_rank)
    source = str(path / CONFIG_NAME)
    reader = ConfigReader(parse_json(raw, source), source)
    ranks = _read_ranks(reader)
    selection = _read_selection(reader)
    reader.finish()
    file = read_safetensors(path / WEIGHTS_NAME, copied=True)
    found = _pair_tensors(file, modules)
    selection.check(found, modules)
    targets = {module: _target(file, module, modules[module], ranks) for module in found}
    rank = max(target.rank for target in targets.values())
    if rank > max_rank:
        raise BadModelFile(
            f"{path}: the adapter's rank is {rank}", limit=f"--max-lora-rank {max_rank}", fix="raise --max-lora-rank"
        )
    digest = sha256(len(raw).to_bytes(8, "little") + raw + file.digest()).digest()
    return AdapterFile(path, digest, rank, _by_parameter(targets, modules), file)


def _read_config(path: Path) -> bytes:
    if not path.is_dir():
        raise ModelNotFound(f"no adapter is at {path}: no such folder", fix="give the folder that PEFT wrote")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (path / name).is_file():
            if name == WEIGHTS_NAME and (path / _PICKLE_NAME).exists():
                raise BadModelFile(
                    f"{path / _PICKLE_NAME}: pickled weights, which can run any code when they are read and are never "
                    "read here", fix="save the adapter as safetensors",
                )  # fmt: skip
            raise ModelNotFound(f"no adapter is at {path}: {name} is missing", fix="give the folder that PEFT wrote")
    with (path / CONFIG_NAME).open("rb") as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise BadModelFile(f"{path / CONFIG_NAME} is too large", limit=f"{MAX_CONFIG_BYTES} bytes", fix=_FIX)
    return content


def _check_size(path: Path, modules: Mapping[str, _Place], max_rank: int) -> None:
    """Raises BadModelFile for a file larger than any adapter of this model: all of it is read into memory."""
    size = path.stat().st_size
    most = sum(sum(place.part.shape) for place in modules.values()) * max_rank * 4 + MAX_HEADER_BYTES
    if size > most:
        raise BadModelFile(
            f"{path} has {size} bytes", limit=f"{most} bytes for this model at --max-lora-rank {max_rank}",
            fix="raise --max-lora-rank, or use an adapter that was made for this model",
        )  # fmt: skip


# -- config ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ranks:
    """Rank and scale of each module; the first pattern that fits a module's name counts."""

    rank: int
    alpha: float
    root: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]

    def of(self, module: str) -> tuple[int, float]:
        rank = next((r for name, r in self.rank_pattern.items() if _fits(module, name)), self.rank)
        alpha = next((a for name, a in self.alpha_pattern.items() if _fits(module, name)), self.alpha)
        scale = alpha / (math.sqrt(rank) if self.root else rank)
        return rank, scale


def _read_ranks(reader: ConfigReader) -> _Ranks:
    reader.ignore(*IGNORED)
    reader.only("peft_type", "LORA", fix=_FIX)
    for key, harmless in _UNSUPPORTED.items():
        reader.only(key, *harmless, fix=_FIX)
    rank, alpha = reader.get("r", int), reader.get("lora_alpha", float)
    rank_pattern = _patterns(reader, "rank_pattern", int)
    alpha_pattern = _patterns(reader, "alpha_pattern", float)
    for value in (rank, *rank_pattern.values()):
        if value < 1:
            raise BadModelFile(f"{reader.source}: a rank is {value}", limit="at least 1", fix=_FIX)
    for number in (alpha, *alpha_pattern.values()):
        if not math.isfinite(number):
            raise BadModelFile(f"{reader.source}: lora_alpha is {number}", limit="a finite number", fix=_FIX)
    root = reader.get("use_rslora", bool, False)
    return _Ranks(rank, alpha, root, rank_pattern, alpha_pattern)


def _patterns(reader: ConfigReader, key: str, kind: type) -> dict[str, Any]:
    """By end of a module's name, or after a ^ by its whole name.

    PEFT takes any regular expression. One that is more than a name is refused: matching it may take for ever.
    """
    given = reader.get(key, dict, {})
    values = ConfigReader(given, f"{reader.source}, {key}")
    for name in given:
        if not _NAME.fullmatch(name):
            raise BadModelFile(
                f"{values.source}: {name[:100]!r} is an expression", limit="names of modules or their ends",
                fix="write out the modules it stands for",
            )  # fmt: skip
    return {name: values.get(name, kind) for name in given}


_NAME = re.compile(r"\^?[\w.-]{1,300}", re.ASCII)


def _fits(module: str, name: str) -> bool:
    return module == name[1:] if name.startswith("^") else _ends_with(module, name)


@dataclass(frozen=True)
class _Selection:
    """Which modules the config says are adapted; None where only the tensors say so."""

    source: str
    names: tuple[str, ...] | None
    excluded: tuple[str, ...]
    layers: frozenset[int] | None

    def check(self, found: list[str], modules: Mapping[str, _Place]) -> None:
        """Raises BadModelFile when modules that are named have no tensors."""
        if self.names is None:
            return
        known = {name.rsplit(".", 1)[1] for name in modules}
        for name in self.names:
            if not any(_ends_with(module, name) for module in modules):
                raise BadModelFile(
                    f"{self.source}: target_modules names {name[:100]!r}, which cannot be adapted in this model",
                    limit=", ".join(sorted(known)), fix=_OTHER,
                )  # fmt: skip
        missing = [module for module in modules if self._selects(module) and module not in found]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise BadModelFile(
                f"{self.source}: target_modules asks for {missing[0]}{more}, whose tensors are missing",
                fix="bring the whole adapter",
            )

    def _selects(self, module: str) -> bool:
        assert self.names is not None
        if self.layers is not None and int(module.split(".layers.")[1].split(".")[0]) not in self.layers:
            return False
        if any(_ends_with(module, name) for name in self.excluded):
            return False
        return any(_ends_with(module, name) for name in self.names)


def _read_selection(reader: ConfigReader) -> _Selection:
    """A `target_modules` that is an expression is not evaluated: the tensors in the file are what it selected."""
    names, excluded = reader.optional("target_modules"), reader.optional("exclude_modules")
    layers, pattern = reader.optional("layers_to_transform"), reader.optional("layers_pattern")
    for key, value in (("target_modules", names), ("exclude_modules", excluded), ("layers_pattern", pattern)):
        if not (value is None or isinstance(value, str) or _is_list(value, str)):
            raise BadModelFile(f"{reader.source}: {key} is {repr(value)[:100]}", limit="a list of names", fix=_FIX)
    layers = [layers] if isinstance(layers, int) else layers
    if not (layers is None or _is_list(layers, int)):
        raise BadModelFile(f"{reader.source}: layers_to_transform is {repr(layers)[:100]}", limit="numbers", fix=_FIX)
    evaluated = isinstance(names, list) and not isinstance(excluded, str)
    return _Selection(
        reader.source, tuple(names) if evaluated else None, tuple(excluded or ()) if evaluated else (),
        frozenset(layers) if layers else None,
    )  # fmt: skip


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


# -- tensors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a module's weight goes in the decoder."""

    parameter: str
    index: int
    part: Part


def _modules(parameters: Mapping[str, Parameter]) -> dict[str, _Place]:
    """The linears of the layers, by their names in the checkpoint."""
    return {
        part.tensor.removesuffix(".weight"): _Place(parameter.name, index, part)
        for parameter in parameters.values()
        if parameter.name.startswith("layers.")
        for index, part in enumerate(parameter.parts)
        if len(part.shape) == 2
    }


def _names(module: str) -> tuple[str, str]:
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def _pair_tensors(file: TensorFile, modules: Mapping[str, _Place]) -> list[str]:
    """The modules that the file adapts. Raises BadModelFile for any other tensor in it, or one without its partner."""
    expected = {name: module for module in modules for name in _names(module)}
    for name in file.tensors:
        if name not in expected:
            raise BadModelFile(
                f"{file.path}: tensor {name[:200]!r} is not of a LoRA adapter of this model",
                limit=f"{_PREFIX}MODULE.lora_A.weight and .lora_B.weight of this model's attention and MLP",
                fix=_OTHER,
            )  # fmt: skip
    found = [module for module in modules if any(name in file.tensors for name in _names(module))]
    for module in found:
        for name in _names(module):
            if name not in file.tensors:
                raise BadModelFile(f"{file.path}: tensor {name!r} is missing", fix="bring the whole adapter")
    if not found:
        raise BadModelFile(f"{file.path}: no tensors", fix="bring the whole adapter")
    return found


def _target(file: TensorFile, module: str, place: _Place, ranks: _Ranks) -> Target:
    rank, scale = ranks.of(module)
    rows, columns = place.part.shape
    a, b = _names(module)
    for name, shape in ((a, (rank, columns)), (b, (rows, rank))):
        info = file.tensors[name]
        if info.shape != shape:
            raise BadModelFile(
                f"{file.path}: tensor {name!r} has shape {info.shape}",
                limit=f"{shape} from rank {rank} and this model", fix=_OTHER,
            )  # fmt: skip
        if info.type not in PLAIN_TYPES:
            raise BadModelFile(
                f"{file.path}: tensor {name!r} is {info.type}", limit=", ".join(PLAIN_TYPES), fix="convert it"
            )
    return Target(place.index, rank, scale, a, b)


def _by_parameter(targets: Mapping[str, Target], modules: Mapping[str, _Place]) -> dict[str, tuple[Target, ...]]:
    grouped: dict[str, list[Target]] = {}
    for module, target in targets.items():
        grouped.setdefault(modules[module].parameter, []).append(target)
    return {name: tuple(sorted(parts, key=lambda t: t.part)) for name, parts in grouped.items()}
