"""Which blocks of the KV cache belong to whom. No torch: blocks are numbers here, memory elsewhere.

Each KV group (layers of one spec) has a pool of its own, and each sequence a block table for each group:

    table    [ -1  -1   7   3   9 ]     block i holds positions i * page_size … (i + 1) * page_size - 1
               ▲▲▲▲▲▲▲  ▲▲▲▲▲▲▲▲▲
               freed    live            freed: out of reach of a sliding window (`trim`)

Several tables may hold a block, and a registered one may be found again by its key (`find`); such a block is never
written. A sequence writes only behind what it began with (`Start`), so full blocks are shared and a partial one is
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.backends.kv import KVSpec, SlidingWindow
from octavo.engine.plan import COPY, Move
from octavo.engine.pool import BlockPool
from octavo.engine.prefix import ChainKeys

FREED = -1
REGISTERED_AT_ONCE = 8
"""blocks of an answer; one by one they cost the host twice as much"""
ELSEWHERE = -2
"""in a `Start`: the content lies in another tier"""


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


@dataclass
class BlockTables:
    """One sequence's tables, one a KV group, all of one length; `trimmed` counts each one's freed entries in front."""

    tables: list[list[int]]
    trimmed: list[int] = field(default_factory=list)
    num_registered: int = 0
    """leading blocks that need not be registered any more"""
    full_at: int = 0
    """once so many tokens are computed, there are `REGISTERED_AT_ONCE` blocks to register"""


@dataclass(frozen=True)
class Start:
    """What a sequence need not compute: for each KV group, the blocks that hold its first `num_tokens` tokens."""

    num_tokens: int
    tables: list[list[int]]
    """full blocks to share; FREED where no later token looks"""
    partial: list[int] = field(default_factory=list)
    """a block to copy for the tokens after the full blocks; empty when there are none"""


NOTHING = Start(0, [])
Elsewhere = Callable[[int, bytes], bool]
"""(KV group, key): whether another tier holds that block"""


class KVBlocks:
    """Every sequence's block tables, over the pools of all KV groups."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.pools = [BlockPool(n) for n in layout.num_blocks]
        self._unsettled: dict[bytes, list[ChainKeys]] = {}
        """by their first key, of what is registered but not yet under its keys"""
        self._windows = [(g, s.window) for g, s in enumerate(layout.specs) if isinstance(s, SlidingWindow)]
        full = [
            pool for pool, spec in zip(self.pools, layout.specs, strict=True) if not isinstance(spec, SlidingWindow)
        ]
        self._head_pool = full[0] if full else None
        """where nothing of a sequence can be found once its first block is gone; None with windows alone"""
        if self._head_pool is not None:
            self._head_pool.on_key_lost = self._forget_unsettled

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used(self) -> int:
        return sum(pool.num_blocks - pool.num_free for pool in self.pools)

    def new_tables(self) -> BlockTables:
        groups = len(self.pools)
        return BlockTables([[] for _ in range(groups)], [0] * groups)

    # -- room ----------------------------------------------------------------------------------------------------------

    def can_ever_hold(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence of `num_tokens`, alone in the cache, fits."""
        return all(n <= pool.num_blocks for n, pool in zip(self._peaks(num_tokens, chunk), self.pools, strict=True))

    def can_start(
        self, num_tokens: int, chunk: int, reserved: Iterable[int] | None = None, start: Start = NOTHING
    ) -> bool:
        """Whether a sequence that holds nothing yet could compute all of `num_tokens`, beginning with `start`, with
        the blocks free now, less what is `reserved` of each group."""
        whole = -(-num_tokens // self.layout.page_size)
        peaks = self._peaks(num_tokens, chunk)
        spared = reserved or [0] * len(self.pools)
        tables = start.tables or [[] for _ in self.pools]
        for pool, table, peak, kept in zip(self.pools, tables, peaks, spared, strict=True):
            not_taken = sum(block == FREED or (block >= 0 and pool.is_held(block)) for block in table)
            if min(whole - not_taken, peak) + kept > pool.num_free:
                return False
        return True

    def owed(self, held: BlockTables, num_tokens: int, chunk: int) -> list[int]:
        """For each group, blocks that a sequence which holds `held` still takes to compute all of `num_tokens`."""
        peaks = self._peaks(num_tokens, chunk)
        live = [len(table) - freed for table, freed in zip(held.tables, held.trimmed, strict=True)]
        return [max(0, peak - have) for peak, have in zip(peaks, live, strict=True)]

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

    def trimmed_too_far(self, held: BlockTables, num_computed: int) -> bool:
        """Whether blocks were freed that a sequence which goes on from `num_computed` tokens needs."""
        return any(held.trimmed[g] > self._first_in_reach(window, num_computed) for g, window in self._windows)

    def trim(self, held: BlockTables, num_computed: int) -> None:
        """Frees blocks whose positions no later token sees, once `num_computed` tokens are in the cache."""
        for group, window in self._windows:
            end = min(self._first_in_reach(window, num_computed), len(held.tables[group]))
            table = held.tables[group]
            first = held.trimmed[group]
            if first < end:
                self.pools[group].release(table[first:end])
                table[first:end] = [FREED] * (end - first)
                held.trimmed[group] = end

    def _first_in_reach(self, window: int, num_computed: int) -> int:
        """The first block that the token at position `num_computed`, or a later one, looks into."""
        return max(0, num_computed - window + 1) // self.layout.page_size

    def release(self, held: BlockTables) -> None:
        """Frees everything; the tables are empty after it.

        Last blocks first, so that what is remembered loses its ends before its beginnings, which more may share.
        """
        for group, table in enumerate(held.tables):
            self.pools[group].release(reversed(table[held.trimmed[group] :]))
            table.clear()
            held.trimmed[group] = 0
        held.num_registered = held.full_at = 0

    # -- sharing -------------------------------------------------------------------------------------------------------

    def register(self, held: BlockTables, keys: ChainKeys, num_computed: int) -> None:
        """Lets the blocks that `num_computed` tokens fill be found; these tokens are final, and in the cache."""
        start, end = held.num_registered, num_computed // self.layout.page_size
        held.full_at = (max(start, end) + REGISTERED_AT_ONCE) * self.layout.page_size
        if start >= end:
            return
        if start == 0 or self._head_pool is None:
            self._register_now(held, keys, start, end if self._head_pool is None else 1)
        if self._head_pool is not None:
            self._register_later(held, keys, max(1, start), end)
        held.num_registered = end

    def _register_now(self, held: BlockTables, keys: ChainKeys, start: int, end: int) -> None:
        new = keys.between(start, end)
        for pool, table in zip(self.pools, held.tables, strict=True):
            live = table[start:end]
            freed = live.count(FREED)  # all in front
            pool.register(live[freed:], new[freed:])

    def _register_later(self, held: BlockTables, keys: ChainKeys, start: int, end: int) -> None:
        """Only a prompt with the same first block can find them: then is the time to compute their keys."""
        if not keys.unsettled and start < end:
            self._unsettled.setdefault(keys[0], []).append(keys)
        for group, table in enumerate(held.tables):
            live = table[start:end]
            freed = live.count(FREED)
            if freed < len(live):
                self.pools[group].register_later(live[freed:], keys, start + freed)
                keys.unsettled.append((group, live[freed:]))

    def _forget_unsettled(self, first_key: bytes) -> None:
        """The first block is gone, so that nobody can find the others."""
        for keys in self._unsettled.pop(first_key, ()):
            keys.unsettled.clear()

    def _settle(self, first_key: bytes) -> None:
        for keys in self._unsettled.pop(first_key, ()):
            for group, blocks in keys.unsettled:
                self.pools[group].settle(blocks, keys)
            keys.unsettled.clear()

    def find(self, keys: ChainKeys, most: int, elsewhere: Elsewhere = lambda group, key: False) -> Start:
        """The longest start, of at most `most` tokens and in full blocks, that is cached as far as later tokens see.

        A full-attention group must have every block, a sliding window those in its reach. Holds until the next
        `take`; takes nothing itself.
        """
        if self._unsettled and most >= self.layout.page_size:
            self._settle(keys[0])
        windows = dict(self._windows)
        found: list[list[int]] = [[] for _ in self.pools]
        runs = [0] * len(self.pools)
        best = 0
        for index in range(most // self.layout.page_size):
            key = keys[index]
            for group, pool in enumerate(self.pools):
                block = pool.lookup(key)
                if block is None:
                    block = ELSEWHERE if elsewhere(group, key) else FREED
                found[group].append(block)
                runs[group] = 0 if block == FREED else runs[group] + 1
            if any(run <= index for group, run in enumerate(runs) if group not in windows):
                break
            end = index + 1
            tokens = end * self.layout.page_size
            if all(runs[group] >= end - self._first_in_reach(window, tokens) for group, window in self._windows):
                best = end
        return self._cut(found, best * self.layout.page_size)

    def _cut(self, tables: Sequence[list[int]], num_tokens: int) -> Start:
        """The full blocks of `num_tokens` tokens, and the partial one after them."""
        full, rest = divmod(num_tokens, self.layout.page_size)
        cut = [table[:full] for table in tables]
        self.free_unseen(cut, num_tokens)
        return Start(num_tokens, cut, [table[full] for table in tables] if rest else [])

    def free_unseen(self, tables: list[list[int]], num_tokens: int) -> None:
        """Marks as freed the entries of these tables that no token after the first `num_tokens` sees."""
        for group, window in self._windows:
            first = min(self._first_in_reach(window, num_tokens), len(tables[group]))
            tables[group][:first] = [FREED] * first

    def start_of(self, held: BlockTables, num_tokens: int) -> Start | None:
        """The first `num_tokens` tokens of another's tables, which has computed them; None where they are freed."""
        if self.trimmed_too_far(held, num_tokens):
            return None
        return self._cut(held.tables, num_tokens)

    def begin(self, held: BlockTables, start: Start) -> tuple[list[Move], list[tuple[int, int]]]:
        """Gives empty tables what `start` names; the caller has checked that blocks are free for it.

        Returns the copies to make, and (KV group, index) of each block taken for what lies elsewhere.
        """
        assert not held.tables[0], "began twice"
        moves: list[Move] = []
        to_load: list[tuple[int, int]] = []
        for group, blocks in enumerate(start.tables):
            pool = self.pools[group]
            for block in blocks:
                if block >= 0:
                    pool.share(block)
            to_load += [(group, index) for index, block in enumerate(blocks) if block == ELSEWHERE]
            held.tables[group] += [pool.take(1)[0] if block == ELSEWHERE else block for block in blocks]
            held.trimmed[group] = next((i for i, b in enumerate(blocks) if b != FREED), len(blocks))
        for group, source in enumerate(start.partial):
            target = self.pools[group].take(1)[0]
            held.tables[group].append(target)
            moves.append(Move(COPY, group, source, target))
        held.num_registered = start.num_tokens // self.layout.page_size
        return moves, to_load

    def fork(self, held: BlockTables, num_tokens: int) -> tuple[BlockTables, list[Move]]:
        """Tables of a new sequence that goes on after the first `num_tokens` tokens of this one.

        Needs one free block a KV group, and that nothing in reach of these tokens is trimmed.
        """
        start = self.start_of(held, num_tokens)
        assert start is not None, "forked from what is freed"
        new = self.new_tables()
        moves, _ = self.begin(new, start)
        return new, moves

    def may_write(self, held: BlockTables, start: int, end: int) -> bool:
        """Whether nobody else reads the blocks of positions `start` to `end` (exclusive)."""
        size = self.layout.page_size
        blocks = range(start // size, -(-end // size))
        return all(self.pools[g].may_write(t[i]) for g, t in enumerate(held.tables) for i in blocks)

    def check_integrity(self, everyone: Sequence[BlockTables]) -> None:
        """Raises AssertionError unless pools and tables agree. Cost: all blocks."""
        assert all(len({len(table) for table in held.tables}) == 1 for held in everyone), "tables differ in length"
        for group, pool in enumerate(self.pools):
            for held in everyone:
                freed = held.trimmed[group]
                assert all(b == FREED for b in held.tables[group][:freed]), "trimmed entry not marked"
                assert FREED not in held.tables[group][freed:], "freed entry beyond the trimmed ones"
            pool.check_integrity(b for held in everyone for b in held.tables[group] if b != FREED)
