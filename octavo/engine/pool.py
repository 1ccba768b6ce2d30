"""The blocks of one KV group: which are in use, which are only remembered, which hold nothing. No torch.

A block is in exactly one of three states:

    blank ──take──▶ held ──release, unregistered──▶ blank
                    held ──release, registered────▶ remembered      (newest at the end)
    remembered ──share──▶ held                     a prefix was found again
    remembered ──take───▶ held, under no key       the oldest first, when no blank one is left

A held block may be registered under a key once its content is final; from then on nobody may write it. Mostly nobody
ever looks for it, so that the key is only computed when somebody might (`settle`), or when the block is given up.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from octavo.engine.prefix import ChainKeys

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
        self.on_key_lost: Callable[[bytes], None] | None = None
        """told the key under which a block could be found that is given up"""
        self._key_of: list[bytes | tuple[ChainKeys, int] | None] = [None] * num_blocks
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
        name = self._key_of[block]
        assert name is not None
        self._key_of[block] = None
        if isinstance(name, bytes):
            del self._block_of[name]
            if self.on_key_lost is not None:
                self.on_key_lost(name)
            if self.on_evict is not None:
                self.on_evict(block, name)
        elif self.on_evict is not None and (key := name[0][name[1]]) not in self._block_of:
            self.on_evict(block, key)
        return block

    def share(self, block: int) -> None:
        """One more table holds this held or remembered block."""
        if self._references[block] == 0:
            assert block in self._remembered, "shared a block that holds nothing"
            del self._remembered[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One table fewer holds them. The first is given up first."""
        references, key_of, remembered, blank = self._references, self._key_of, self._remembered, self._blank
        for block in blocks:
            assert references[block] > 0, "released a free block"
            references[block] -= 1
            if references[block] == 0:
                if key_of[block] is None:
                    blank.append(block)
                else:
                    remembered[block] = None

    def register(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """Names the final content of held blocks. One whose key another block has stays without."""
        references, key_of, block_of = self._references, self._key_of, self._block_of
        for block, key in zip(blocks, keys, strict=True):
            if block_of.setdefault(key, block) == block:
                assert references[block] > 0, "registered a free block"
                assert key_of[block] in (None, key), "a block's content has changed"
                key_of[block] = key

    def register_later(self, blocks: Iterable[int], keys: ChainKeys, start: int) -> None:
        """The same under keys from `start` on, which `settle` will ask for."""
        references, key_of = self._references, self._key_of
        for index, block in enumerate(blocks, start):
            assert references[block] > 0, "registered a free block"
            assert key_of[block] is None, "a block's content has changed"
            key_of[block] = (keys, index)

    def settle(self, blocks: Sequence[int], keys: ChainKeys) -> None:
        """Makes those of `blocks` findable that still wait for their key of `keys`."""
        for block in blocks:
            name = self._key_of[block]
            if not isinstance(name, tuple) or name[0] is not keys:
                continue
            key = keys[name[1]]
            if self._block_of.setdefault(key, block) == block:
                self._key_of[block] = key
                continue
            self._key_of[block] = None
            if block in self._remembered:
                del self._remembered[block]
                self._blank.append(block)

    def newest(self) -> Iterator[tuple[int, bytes]]:
        """(block, key) of those that only are remembered; what was used last, and of that the beginning, first."""
        for block in reversed(self._remembered):
            name = self._key_of[block]
            assert name is not None
            yield block, name if isinstance(name, bytes) else name[0][name[1]]

    def lookup(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def is_held(self, block: int) -> bool:
        return self._references[block] > 0

    def may_write(self, block: int) -> bool:
        """Whether exactly one table holds it, and no key promises its content."""
        return self._references[block] == 1 and self._key_of[block] is None

    def check_integrity(self, held: Iterable[int]) -> None:
        """`held`: every live entry of every table."""
        counts = Counter(held)
        assert all(self._references[b] == counts[b] for b in range(self.num_blocks)), "references differ from tables"
        free = sorted([*self._blank, *self._remembered])
        assert free == [b for b in range(self.num_blocks) if not counts[b]], "free blocks are lost or doubled"
        named = {key: block for block, key in enumerate(self._key_of) if isinstance(key, bytes)}
        assert named == self._block_of, "keys and blocks differ"
        assert None not in [self._key_of[block] for block in self._remembered], "a remembered block has no key"
        assert all(self._key_of[block] is None for block in self._blank), "a blank block has a key"
