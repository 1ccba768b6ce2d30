"""Large matrices of test cases: a fresh random sample by default, the whole with OCTAVO_FULL=1.

`OCTAVO_SEED` fixes the sample; the seed in use stands in pytest's header.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("OCTAVO_FULL") == "1"
SEED = int(os.environ.get("OCTAVO_SEED") or random.SystemRandom().randrange(1 << 32))


def sample(cases: Iterable[T], k: int) -> list[T]:
    """All cases when the run is full, else `k` of them in their own order. The same seed gives the same cases."""
    every = list(cases)
    if FULL or k >= len(every):
        return every
    print(f"sample of {k} from {len(every)} cases, OCTAVO_SEED={SEED}")
    chosen = random.Random(f"{SEED}/{len(every)}/{k}").sample(range(len(every)), k)
    return [every[i] for i in sorted(chosen)]
