"""Which slots of host memory hold which blocks of one KV group. No torch: slots are numbers here.

                   ┌────────────── take ──────────────┐
    free ── take ──▶ held (references > 0) ── release ─▶ kept (has a key; the longest unused is taken first)
      ▲                        ▲   │                          │
      └──── release (no key) ──┼───┘                          │
                               └────────── share ◀────────────┘

A slot is held by a copy that is on its way, by a preempted sequence whose block it is, or by a request that waits for
blocks from the disk. A kept one is nobody's: it is there to be found again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class HostTier:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._references = [0] * num_slots
        self._keys: list[bytes | None] = [None] * num_slots
        self._slots: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_takeable(self) -> int:
        return len(self._free) + len(self._kept)

    def find(self, key: bytes) -> int | None:
        """The slot of that key, held or kept."""
        return self._slots.get(key)

    def key_of(self, slot: int) -> bytes | None:
        return self._keys[slot]

    def take(self, key: bytes | None = None) -> int | None:
        """A slot, held once: a free one, else that of the kept block unused for longest; None when all are held.

        The key, which no slot has yet, is found from now on.
        """
        if self._free:
            slot = self._free.pop()
        elif self._kept:
            slot, _ = self._kept.popitem(last=False)
            self._forget(slot)
        else:
            return None
        self._references[slot] = 1
        if key is not None:
            self.name(slot, key)
        return slot

    def name(self, slot: int, key: bytes) -> None:
        """Gives a held slot without a key this one, which no slot has yet."""
        assert self._references[slot] > 0 and self._keys[slot] is None and key not in self._slots
        self._keys[slot] = key
        self._slots[key] = slot

    def share(self, slot: int) -> None:
        """One more holds this slot, held or kept."""
        self._kept.pop(slot, None)
        self._references[slot] += 1

    def release(self, slot: int) -> None:
        """One fewer holds it. The last one leaves it to be found by its key, or free."""
        assert self._references[slot] > 0, "released a slot that nobody holds"
        self._references[slot] -= 1
        if self._references[slot] == 0:
            if self._keys[slot] is None:
                self._free.append(slot)
            else:
                self._kept[slot] = None

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        assert key is not None
        del self._slots[key]
        self._keys[slot] = None

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless exactly these slots are held, each as often as it is named."""
        counts = Counter(held)
        assert all(self._references[s] == counts[s] for s in range(self.num_slots)), "references differ from holders"
        idle = [s for s in range(self.num_slots) if not counts[s]]
        assert sorted([*self._free, *self._kept]) == idle, "a slot is lost or doubled"
        assert all(self._keys[s] is None for s in self._free), "a free slot has a key"
        assert all(self._keys[s] is not None for s in self._kept), "a kept slot has no key"
        named = {key: slot for slot, key in enumerate(self._keys) if key is not None}
        assert named == self._slots, "keys and slots differ"
