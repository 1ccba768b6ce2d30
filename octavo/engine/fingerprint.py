"""The numerics fingerprint: everything that the bits of an answer depend on, in one short name.

Two engines of one fingerprint give the same tokens and logprobs for the same request, so one may go on where the other
stopped, and KV blocks of one may serve the other. It takes in the bytes of the weights, not their path; of the kernels
the bytes of the library, so that another compiler makes another fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

import octavo
from octavo.backends.base import Device
from octavo.backends.cpu import lib
from octavo.models.checkpoint import Checkpoint

READ_BYTES = 16 << 20


def weights_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 (hexadecimal) of the config and of every file that holds weights, in the order of their names."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for path in sorted({stored.file.path for stored in checkpoint.stored.values()}):
        digest.update(file_digest(path))
    return digest.hexdigest()


def file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.digest()


def numerics(
    weights: str, device: Device, dtype: torch.dtype, kv_cache_dtype: str, page_size: int, ranks: int
) -> dict[str, str | int]:
    """What the fingerprint is made of, by name."""
    facts: dict[str, str | int] = {
        "weights": weights, "octavo": octavo.__version__, "device": device.name, "kernels": device.kernels,
        "dtype": str(dtype), "kv_cache_dtype": kv_cache_dtype, "page_size": page_size, "ranks": ranks,
        "torch": torch.__version__, "ops": type(device.ops).__name__,
    }  # fmt: skip
    library = lib.load() if device.name == "cpu" else None
    if library is not None:
        facts["library"] = library.digest
    else:  # torch's own sums depend on the machine and on how many threads share them
        facts |= {"threads": torch.get_num_threads(), "machine": platform.machine(), "cpu": _cpu_capability()}
    return facts


def fingerprint(facts: Mapping[str, str | int]) -> str:
    """128 bits in hexadecimal."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _cpu_capability() -> str:
    return str(torch.backends.cpu.get_cpu_capability())
