"""Which adapters are loaded, under what name, and which only wait for their last sequences. No torch.

    load ──▶ loaded, by name ──unload, or load in place──▶ leaving ──last sequence ended──▶ gone

A number names one load of an adapter and is never given twice: a sequence keeps the weights that it began with,
whatever becomes of their name. What outlives a sequence, such as the prefix cache, is keyed by the content's digest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

import msgspec

from octavo.errors import InvalidRequest, ModelNotFound, NotSupported

MAX_NAME_CHARACTERS = 256
MAX_NAMES_SHOWN = 16


class LoadedAdapter(msgspec.Struct, frozen=True):
    name: str
    path: str
    number: int
    """from 1"""
    rank: int
    digest: bytes
    """SHA-256 of its config and weights"""


class AdapterFacts(msgspec.Struct, frozen=True):
    """What the ranks found while loading one."""

    rank: int
    digest: bytes


@dataclass(frozen=True)
class LoRARequest:
    """Which adapter computes a prompt, as in vLLM. It is known by its name; `lora_int_id` is there for vLLM's callers.

    `load_inplace` loads it again, also where one of that name is loaded.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("lora_name", str), ("lora_path", str), ("lora_int_id", int)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidRequest(
                    f"{name} is {getattr(self, name)!r}", limit=f"a {kind.__name__}", fix=f"correct {name}", param=name
                )
        if self.lora_int_id < 1:
            raise InvalidRequest(
                f"lora_int_id is {self.lora_int_id}", limit="at least 1", fix="give another id", param="lora_int_id"
            )


class AdapterHost(Protocol):
    """The executor's part: the weights, on all ranks, between two steps."""

    def load_adapter(self, number: int, path: str) -> AdapterFacts: ...

    def unload_adapter(self, number: int) -> None: ...


class Adapters:
    """At most `limit` are loaded; with those that are leaving, at most twice as many are in memory."""

    def __init__(self, host: AdapterHost, enabled: bool, limit: int) -> None:
        self._host, self._enabled, self._limit = host, enabled, limit
        self._numbers = itertools.count(1)
        self.loaded: dict[str, LoadedAdapter] = {}
        self.leaving: set[int] = set()

    def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Raises InvalidRequest for a name that is taken or impossible or when there are too many, and what the
        executor raises; nothing has changed then."""
        if not self._enabled:
            raise NotSupported("adapters are not enabled", fix="start with --enable-lora")
        if not name or not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
            raise InvalidRequest(
                f"lora_name is {name[:60]!r}", limit=f"1 to {MAX_NAME_CHARACTERS} printable characters",
                fix="choose another name", param="lora_name",
            )  # fmt: skip
        old = self.loaded.get(name)
        if old is not None and not in_place:
            raise already_loaded(name)
        if old is None and len(self.loaded) >= self._limit:
            raise InvalidRequest(
                f"{len(self.loaded)} adapters are loaded", limit=f"--max-loras {self._limit}",
                fix="unload one, or raise --max-loras", param="lora_name",
            )  # fmt: skip
        if len(self.loaded) + len(self.leaving) >= 2 * self._limit:
            raise InvalidRequest(
                f"requests still run with {len(self.leaving)} adapters that were unloaded or replaced",
                limit=f"{2 * self._limit} in memory, twice --max-loras", fix="try again when they have ended",
                param="lora_name",
            )  # fmt: skip
        number = next(self._numbers)
        facts = self._host.load_adapter(number, path)
        self.loaded[name] = LoadedAdapter(name, path, number, facts.rank, facts.digest)
        if old is not None:
            self.leaving.add(old.number)

    def unload(self, name: str) -> None:
        """New requests no longer find it; those that run with it end as they would have. Raises ModelNotFound."""
        if name not in self.loaded:
            raise not_found(name, self.loaded)
        self.leaving.add(self.loaded.pop(name).number)

    def sweep(self, in_use: Set[int]) -> None:
        """Frees those that are leaving and that no sequence uses."""
        for number in self.leaving - in_use:
            self.leaving.remove(number)
            self._host.unload_adapter(number)


def find(adapters: Mapping[str, LoadedAdapter], name: str | None) -> LoadedAdapter | None:
    """The adapter of that name; None for the base model. Raises ModelNotFound, in vLLM's words."""
    if name is not None and name not in adapters:
        raise unknown_model(name, tuple(adapters), "Adapters")
    return None if name is None else adapters[name]


def already_loaded(name: str) -> InvalidRequest:
    """In vLLM's words."""
    return InvalidRequest(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True.", param="lora_name",
    )  # fmt: skip


def not_found(name: str, loaded: Iterable[str]) -> ModelNotFound:
    """In vLLM's words, and what is loaded."""
    said = f"The lora adapter '{name}' cannot be found. Loaded: {_listed(loaded) or 'none'}."
    return ModelNotFound(said, param="lora_name")


def unknown_model(name: str, known: Iterable[str], what: str = "Served") -> ModelNotFound:
    """In vLLM's words, and what there is instead."""
    return ModelNotFound(f"The model `{name}` does not exist. {what}: {_listed(known) or 'none'}.", param="model")


def _listed(names: Iterable[str]) -> str:
    shown = list(itertools.islice(names, MAX_NAMES_SHOWN + 1))
    return ", ".join(shown[:MAX_NAMES_SHOWN]) + (", …" if len(shown) > MAX_NAMES_SHOWN else "")
