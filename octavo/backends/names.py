"""Names of devices, without torch: a command refuses a device that is not here before it loads anything."""

from __future__ import annotations

from octavo.errors import DeviceUnavailable, UsageError

DEVICES = {
    "cpu": "octavo.backends.cpu.device:CpuDevice",
    "reference": "octavo.backends.reference:ReferenceDevice",
}
"""Name to `module:attribute`, imported on use. `reference` is plain torch on the CPU."""

COMPUTED_AS = {("auto", "float16"): "bfloat16", ("cpu", "float16"): "bfloat16"}
"""(device, dtype) to the dtype that the device computes in instead"""

PLANNED = ("npu", "cuda", "gpu")


def check_device(name: str) -> None:
    """Raises DeviceUnavailable for a device that this build cannot have, UsageError for an unknown name."""
    if name != "auto" and name not in DEVICES:
        raise unknown_device(name)


def unknown_device(name: str) -> UsageError:
    known = ", ".join(DEVICES)
    if name in PLANNED:
        return DeviceUnavailable(
            f"--device {name}: this build of Octavo has no {name} backend, or the machine has no such device",
            fix=f"use --device cpu (available: {known})", param="device",
        )  # fmt: skip
    return UsageError(f"--device {name} is unknown", fix=f"one of auto, {known}", param="device")
