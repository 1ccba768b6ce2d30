"""Names of devices, without torch: a command refuses a device that is not here before it loads anything."""

from __future__ import annotations

from octavo.backends.sim.profiles import PROFILES
from octavo.errors import DeviceUnavailable, UsageError

DEVICES = {
    "cpu": "octavo.backends.cpu.device:CpuDevice",
    "reference": "octavo.backends.reference:ReferenceDevice",
    "sim": "octavo.backends.sim.device:SimDevice",
}
"""Name to `module:attribute`, imported on use. `reference` is plain torch on the CPU, `sim` computes nothing and may be
followed by the machine that it is to resemble: `sim:h100`."""

COMPUTED_AS = {("auto", "float16"): "bfloat16", ("cpu", "float16"): "bfloat16"}
"""(device, dtype) to the dtype that the device computes in instead"""

PLANNED = ("npu", "cuda", "gpu")


def check_device(name: str) -> None:
    """Raises DeviceUnavailable for a device that this build cannot have, UsageError for an unknown name."""
    kind, colon, profile = name.partition(":")
    if kind == "sim" and (not colon or profile in PROFILES):
        return
    if name != "auto" and name not in DEVICES:
        raise unknown_device(name)


def reads_weights(name: str) -> bool:
    """Whether the device computes at all; for one that does not, a model's settings are enough."""
    return name.partition(":")[0] != "sim"


def unknown_device(name: str) -> UsageError:
    known = ", ".join(DEVICES)
    if name in PLANNED:
        return DeviceUnavailable(
            f"--device {name}: this build of Octavo has no {name} backend, or the machine has no such device",
            fix=f"use --device cpu (available: {known})", param="device",
        )  # fmt: skip
    if name.startswith("sim:"):
        profiles = ", ".join(f"sim:{profile}" for profile in PROFILES)
        return UsageError(f"--device {name} is unknown", fix=f"one of {profiles}", param="device")
    return UsageError(f"--device {name} is unknown", fix=f"one of auto, {known}", param="device")
