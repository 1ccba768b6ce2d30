"""What the simulated device can do: published peak figures, which no program reaches. No torch."""

from __future__ import annotations

from dataclasses import dataclass

GB, TB, TERA = 10**9, 10**12, 1e12


@dataclass(frozen=True)
class Profile:
    flops: float
    """a second, dense, in bfloat16 or float16"""
    bandwidth: float
    """bytes a second from device memory"""
    memory: int
    """bytes"""
    page_size: int
    """tokens in a KV block, unless the user names another"""
    source: str


PROFILES = {
    "ascend-910b": Profile(
        376 * TERA, 1.6 * TB, 64 * GB, 128,
        "one of the two dies of an Ascend 910C: half of 752 TFLOPS, 3.2 TB/s and 128 GB (arXiv:2506.12708)",
    ),
    "ascend-310p": Profile(
        70 * TERA, 204 * GB, 48 * GB, 128,
        "one of the two chips of an Atlas 300I Duo: half of 140 TFLOPS, 408 GB/s and 96 GB (Huawei's product page)",
    ),
    "a100": Profile(312 * TERA, 2.039 * TB, 80 * GB, 16, "A100 80GB SXM (NVIDIA's data sheet)"),
    "h100": Profile(989 * TERA, 3.35 * TB, 80 * GB, 16, "H100 SXM, without sparsity (NVIDIA's data sheet)"),
}  # fmt: skip
DEFAULT = "ascend-910b"
