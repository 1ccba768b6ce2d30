"""The kernel library `liboctavo_cpu.so`: found, checked and bound. Missing and broken are told apart.

`OCTAVO_CPU_LIBRARY` names another file; `OCTAVO_CPU_ISA` a lesser instruction set than the machine has.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.errors import DeviceUnavailable, UsageError

ABI_VERSION = 4
ISAS = ("avx512_bf16", "avx512", "avx2", "generic")
"""Best first."""

_P, _N = c_void_p, c_int64
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pack_linear": (None, (_P, _N, _N, _N, _P)),
    "linear": (None, (_P, _N, _N, _P, _P, _N, _N, _P, _N, c_int)),
    "write_kv": (None, (_P, _N, _P, _N, _P, _P, _N)),
    "attention": (None, (_P, _N, _P, _N, _P, _P, _P, _P, _N, _N, _N, c_float, _N)),
    "rms_norm": (None, (_P, _N, _P, _P, _N, _N, c_float)),
    "add_rms_norm": (None, (_P, _P, _P, _P, _N, _N, c_float)),
    "rope": (None, (_P, _N, _P, _P, _N, _N, _N, _N)),
    "gated_silu": (None, (_P, _N, _P, _N, _N)),
    "gated_gelu_tanh": (None, (_P, _N, _P, _N, _N)),
    "embed": (c_int, (_P, _N, _P, _P, _N, _N)),
    "filter": (None, (_P, _N, _N, _N, _P, _P, _P, _P)),
    "mask": (None, (_P, _N, _N, _N, _P, _P)),
    "penalize": (None, (_P, _N, _N, _P, _P, _P, _P, _P, _P, _P, _P)),
    "sample": (None, (_P, _N, _N, _N, _P, _P, _P)),
    "exponential_noise": (None, (_P, _N, _N, _P)),
    "logprobs": (None, (_P, _N, _N, _N, _P, _P, _P, _N, _P, _P)),
    "dequantize": (c_int, (c_int, _P, _N, _P, _N, c_int)),
}


class KVCacheLayout(ctypes.Structure):
    """`OctavoKvCache` of octavo_cpu.h."""

    _fields_ = (
        ("keys", c_void_p), ("values", c_void_p), ("key_scales", c_void_p), ("value_scales", c_void_p),
        ("kv_heads", c_int64), ("head_dim", c_int64), ("page_size", c_int64), ("format", c_int64),
    )  # fmt: skip


class Kernels:
    """The kernels of one instruction set, as attributes: plain C functions of pointers and sizes (octavo_cpu.h)."""

    pack_linear: Callable[..., None]
    linear: Callable[..., None]
    write_kv: Callable[..., None]
    attention: Callable[..., None]
    rms_norm: Callable[..., None]
    add_rms_norm: Callable[..., None]
    rope: Callable[..., None]
    gated_silu: Callable[..., None]
    gated_gelu_tanh: Callable[..., None]
    embed: Callable[..., int]
    filter: Callable[..., None]
    mask: Callable[..., None]
    penalize: Callable[..., None]
    sample: Callable[..., None]
    exponential_noise: Callable[..., None]
    logprobs: Callable[..., None]
    dequantize: Callable[..., int]

    def __init__(self, dll: ctypes.CDLL, isa: str) -> None:
        self.isa = isa
        for name, (result, arguments) in _SIGNATURES.items():
            function = dll[f"oct_{name}_{isa}"]
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


class Library:
    """The loaded library and what it can run here."""

    def __init__(self, path: Path) -> None:
        """Raises DeviceUnavailable for a file that cannot be loaded or is of another version."""
        try:
            self._dll = ctypes.CDLL(str(path))
            version = self._dll.oct_abi_version()
        except (OSError, AttributeError) as err:
            raise DeviceUnavailable(f"{path} cannot be loaded: {err}", fix="build it again: pip install .") from err
        if version != ABI_VERSION:
            raise DeviceUnavailable(
                f"{path} has interface version {version}", limit=f"this Octavo needs {ABI_VERSION}",
                fix="build it again: pip install .",
            )  # fmt: skip
        self._dll.oct_best_isa.restype = c_char_p
        self._dll.oct_isa_supported.argtypes = (c_char_p,)
        self._dll.oct_set_threads.argtypes = (c_int, c_int)
        self.best_isa: str = self._dll.oct_best_isa().decode()
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        """SHA-256 of the file"""

    def isas(self) -> tuple[str, ...]:
        """What this machine runs, best first."""
        return tuple(isa for isa in ISAS if self._dll.oct_isa_supported(isa.encode()))

    def kernels(self, isa: str | None = None) -> Kernels:
        """Those of `isa`, or the best. Raises UsageError for one that this machine does not run."""
        isa = isa or self.best_isa
        if isa not in self.isas():
            raise UsageError(
                f"OCTAVO_CPU_ISA is {isa}", limit=f"this machine runs {', '.join(self.isas())}", fix="unset it"
            )
        return Kernels(self._dll, isa)

    @property
    def threads(self) -> int:
        return int(self._dll.oct_threads())

    def set_threads(self, threads: int, pin: bool = False) -> None:
        """How many threads kernels use, the caller included. `pin` binds each to one CPU, the caller too."""
        self._dll.oct_set_threads(threads, pin)


@cache
def load() -> Library | None:
    """The library, or None where it is not installed. Raises DeviceUnavailable where it is broken."""
    named = os.environ.get("OCTAVO_CPU_LIBRARY")
    path = Path(named) if named else Path(__file__).with_name("liboctavo_cpu.so")
    if not named and not path.exists():
        return None
    return Library(path)


@cache
def kernels() -> Kernels | None:
    """Those of the instruction set to use, or None without a library."""
    library = load()
    return None if library is None else library.kernels(os.environ.get("OCTAVO_CPU_ISA") or None)


def available() -> bool:
    return load() is not None


def dequantize(type_id: int, data: np.ndarray[Any, np.dtype[np.uint8]], out: torch.Tensor) -> None:
    """Writes the values of GGUF blocks of ggml type `type_id` over `out`, contiguous float32 or bfloat16."""
    functions = kernels()
    assert functions is not None, "ask available() first"
    assert out.dtype in (torch.float32, torch.bfloat16) and out.is_contiguous(), (out.dtype, out.stride())
    assert data.dtype == np.uint8 and data.flags.c_contiguous, data.dtype
    failed = functions.dequantize(
        type_id, data.ctypes.data, data.size, out.data_ptr(), out.numel(), out.dtype is torch.float32
    )
    assert not failed, f"{data.size} bytes of ggml type {type_id} for {out.numel()} values"
