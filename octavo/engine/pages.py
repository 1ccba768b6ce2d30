"""Which blocks of the KV cache belong to whom. No torch: blocks are numbers here, memory elsewhere.

Each KV group (layers of one spec) has a pool of its own, and each sequence a block table for each group:

    table    [ -1  -1   7   3   9 ]     block i holds positions i * page_size … (i + 1) * page_size - 1
               ▲▲▲▲▲▲▲  ▲▲▲▲▲▲▲▲▲
               freed    live            freed: out of reach of a sliding window (`trim`)

A block's reference count is the number of tables it stands in; it is free when that is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.backends.kv import KVSpec, SlidingWindow

FREED = -1


@dataclass(frozen=True)
class KVLayout:
    """How the KV cache is cut up: one entry of `specs` and `num_blocks` for each KV group."""

    page_size: int
    specs: tuple[KVSpec, ...]
    num_blocks: tuple[int, ...]


def peak_blocks(spec: KVSpec, page_size: int, num_tokens: int, chunk: int) -> int:
    """Most blocks that a sequence of `num_tokens` holds at once, when each step computes at most `chunk` tokens.

    A window needs the chunk's positions and the window - 1 before them; n positions touch at most
    ceil((n - 1) / page_size) + 1 blocks.
    """
    whole = -(-num_tokens // page_size)
    if not isinstance(spec, SlidingWindow):
        return whole
    return min(whole, -(-(spec.window + chunk - 2) // page_size) + 1)


class BlockPool:
    """The blocks of one KV group. Low numbers go first and a freed one goes next, so that memory is touched lazily."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, referenced once. The caller has checked `num_free`."""
        assert count <= len(self._free), "took more blocks than are free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more table holds this live block."""
        assert self._references[block] > 0, "shared a free block"
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One table fewer holds it; the last one frees it."""
        assert self._references[block] > 0, "released a free block"
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)

    def check_integrity(self, held: Iterable[int]) -> None:
        """`held`: every live entry of every table."""
        counts = Counter(held)
        assert all(self._references[b] == counts[b] for b in range(self.num_blocks)), "references differ from tables"
        assert sorted(self._free) == [b for b in range(self.num_blocks) if not counts[b]], "free list is wrong"


@dataclass
class BlockTables:
    """One sequence's tables, one a KV group, all of one length; `trimmed` counts each one's freed entries in front."""

    tables: list[list[int]]
    trimmed: list[int] = field(default_factory=list)


class KVBlocks:
    """Every sequence's block tables, over the pools of all KV groups."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.pools = [BlockPool(n) for n in layout.num_blocks]
        self._windows = [(g, s.window) for g, s in enumerate(layout.specs) if isinstance(s, SlidingWindow)]

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used(self) -> int:
        return sum(pool.num_blocks - pool.num_free for pool in self.pools)

    def new_tables(self) -> BlockTables:
        groups = len(self.pools)
        return BlockTables([[] for _ in range(groups)], [0] * groups)

    def can_ever_hold(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence of `num_tokens`, alone in the cache, fits."""
        return all(n <= pool.num_blocks for n, pool in zip(self._peaks(num_tokens, chunk), self.pools, strict=True))

    def can_start(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence that holds nothing yet could compute all of `num_tokens` with the blocks free now."""
        return all(n <= pool.num_free for n, pool in zip(self._peaks(num_tokens, chunk), self.pools, strict=True))

    def _peaks(self, num_tokens: int, chunk: int) -> list[int]:
        return [peak_blocks(spec, self.layout.page_size, num_tokens, chunk) for spec in self.layout.specs]

    def extend(self, held: BlockTables, num_tokens: int) -> bool:
        """Lengthens all tables to hold `num_tokens` positions; False, and nothing changed, when blocks are short."""
        missing = -(-num_tokens // self.layout.page_size) - len(held.tables[0])
        if missing <= 0:
            return True
        if any(pool.num_free < missing for pool in self.pools):
            return False
        for table, pool in zip(held.tables, self.pools, strict=True):
            table += pool.take(missing)
        return True

    def trim(self, held: BlockTables, num_computed: int) -> None:
        """Frees blocks whose positions no later token sees, once `num_computed` tokens are in the cache."""
        for group, window in self._windows:
            reachable = max(0, num_computed - window + 1) // self.layout.page_size
            self._free_front(held, group, min(reachable, len(held.tables[group])))

    def _free_front(self, held: BlockTables, group: int, end: int) -> None:
        table = held.tables[group]
        for index in range(held.trimmed[group], end):
            self.pools[group].release(table[index])
            table[index] = FREED
        held.trimmed[group] = max(held.trimmed[group], end)

    def release(self, held: BlockTables) -> None:
        """Frees everything; the tables are empty after it. Last blocks first, so that low ones are reused first."""
        for group, table in enumerate(held.tables):
            for block in reversed(table[held.trimmed[group] :]):
                self.pools[group].release(block)
            table.clear()
            held.trimmed[group] = 0

    def check_integrity(self, everyone: Sequence[BlockTables]) -> None:
        """Raises AssertionError unless pools and tables agree. Cost: all blocks."""
        assert all(len({len(table) for table in held.tables}) == 1 for held in everyone), "tables differ in length"
        for group, pool in enumerate(self.pools):
            for held in everyone:
                freed = held.trimmed[group]
                assert all(b == FREED for b in held.tables[group][:freed]), "trimmed entry not marked"
                assert FREED not in held.tables[group][freed:], "freed entry beyond the trimmed ones"
            pool.check_integrity(b for held in everyone for b in held.tables[group] if b != FREED)
