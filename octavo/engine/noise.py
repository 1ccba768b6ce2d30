"""Keys of the counter-based random numbers: which noise a token gets depends on nothing but its own place. No torch.

    h = 0
    for x in (seed, choice, purpose, position):      each taken modulo 2**64
        h = fmix64(h + (x + 1) * 0x9E3779B97F4A7C15)

fmix64 is the finalizer of MurmurHash3 (public domain, Austin Appleby). `position` is the absolute position of the
token to be sampled, the prompt included, so a preempted or resumed request draws the noise that it would have drawn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WEYL = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
FEW = 4
"""sequences for which plain numbers are quicker than arrays"""
SAMPLE = 0
"""purpose: choosing the token at a position"""
DRAW_SEED = 1
"""purpose: the seed of a request that brought none"""


def noise_key(seed: int, choice: int, position: int, purpose: int = SAMPLE) -> int:
    """The 64-bit key of one position."""
    return _absorb(noise_stem(seed, choice, purpose), position)


def noise_stem(seed: int, choice: int, purpose: int = SAMPLE) -> int:
    """What all positions of a sequence share; `noise_keys` finishes it."""
    stem = 0
    for part in (seed, choice, purpose):
        stem = _absorb(stem, part)
    return stem


def noise_keys(stems: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """`noise_key` of many sequences: stems [R] and positions [R] to keys [R]."""
    if len(stems) <= FEW:
        keys = [_absorb(stem, position) for stem, position in zip(stems.tolist(), positions.tolist(), strict=True)]
        return np.array(keys, np.uint64)
    h: npt.NDArray[np.uint64] = stems + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(WEYL)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


def _absorb(h: int, part: int) -> int:
    h = (h + ((part + 1) & MASK) * WEYL) & MASK
    h = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    h = ((h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return h ^ (h >> 33)
