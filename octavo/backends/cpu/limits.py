"""What the system lets this process use: CPUs and memory, a container's limits included."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil


def default_threads() -> int:
    """CPUs that this process may run on, no more than its control group's quota pays for."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(_group_folders())
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def memory() -> tuple[int, int]:
    """Bytes (total, available), within the control group's limit and that of the process's addresses (ulimit -v)."""
    facts = psutil.virtual_memory()
    total, available = facts.total, facts.available
    for folder in _group_folders():
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            total, available = min(total, int(limit)), min(available, max(0, int(limit - used)))
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        used = psutil.Process().memory_info().vms
        total, available = min(total, addresses), min(available, max(0, addresses - used))
    return total, available


def cpu_quota(folders: list[Path]) -> float | None:
    """The least quota, in CPUs, of the folders' `cpu.max` (version 2) or `cpu.cfs_quota_us` (version 1)."""
    quotas = []
    for folder in folders:
        both = _read(folder / "cpu.max").split()
        if len(both) == 2 and both[0] != "max":
            quotas.append(float(both[0]) / float(both[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _group_folders() -> list[Path]:
    """Of this process's control group and its parents, and of the version 1 cpu controller."""
    root = Path("/sys/fs/cgroup")
    path = next((line[3:] for line in _read(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")), "/")
    own = root / path.lstrip("/")
    return [own, *(parent for parent in own.parents if parent.is_relative_to(root)), root / "cpu"]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    text = _read(path).strip()
    return float(text) if text.lstrip("-").isdigit() else None
