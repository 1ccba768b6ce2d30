"""The blocks of one KV group: which are in use, which are only remembered, which hold nothing. No torch.

A block is in exactly one of three states:

    blank ──take──▶ held ──release, unregistered──▶ blank
                    held ──release, registered────▶ remembered      (newest at the end)
    remembered ──share──▶ held                     a prefix was found again
    remembered ──take───▶ held, under no key       the oldest first, when no blank one is left

A held block may be registered under a key once its content is final; from then on nobody may write it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

OnEvict = Callable[[int, bytes], None]
"""(block, key) of a remembered block whose content is about to be given up"""


class BlockPool:
    """Low numbers go first and a blank one that was freed goes next, so that memory is touched lazily."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: OnEvict | None = None
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._remembered: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give."""
        return len(self._blank) + len(self._remembered)

    @property
    def num_remembered(self) -> int:
        return len(self._remembered)

    def take(self, count: int) -> list[int]:
        """`count` blocks, referenced once, under no key. The caller has checked `num_free`."""
        assert count <= self.num_free, "took more blocks than are free"
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._remembered.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        if self.on_evict is not None:
            self.on_evict(block, key)
        return block

    def share(self, block: int) -> None:
        """One more table holds this held or remembered block."""
        if self._references[block] == 0:
            assert block in self._remembered, "shared a block that holds nothing"
            del self._remembered[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One table fewer holds it."""
        assert self._references[block] > 0, "released a free block"
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._key_of:
                self._remembered[block] = None
            else:
                self._blank.append(block)

    def register(self, block: int, key: bytes) -> bool:
        """Names the final content of a held block; False, and nothing changed, where another block has that key."""
        assert self._references[block] > 0, "registered a free block"
        if self._block_of.setdefault(key, block) != block:
            return False
        assert self._key_of.setdefault(block, key) == key, "a block's content has changed"
        return True

    def lookup(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def is_held(self, block: int) -> bool:
        return self._references[block] > 0

    def may_write(self, block: int) -> bool:
        """Whether exactly one table holds it, and no key promises its content."""
        return self._references[block] == 1 and block not in self._key_of

    def check_integrity(self, held: Iterable[int]) -> None:
        """`held`: every live entry of every table."""
        counts = Counter(held)
        assert all(self._references[b] == counts[b] for b in range(self.num_blocks)), "references differ from tables"
        free = sorted([*self._blank, *self._remembered])
        assert free == [b for b in range(self.num_blocks) if not counts[b]], "free blocks are lost or doubled"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "keys and blocks differ"
        assert self._remembered.keys() <= self._key_of.keys(), "a remembered block has no key"
        assert not self._key_of.keys() & set(self._blank), "a blank block has a key"
