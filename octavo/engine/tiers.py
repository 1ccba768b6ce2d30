"""Blocks of the KV cache beyond the device: slots of host memory, then files. No torch; decides, and moves nothing.

    device ── SAVE, when a remembered block is given up, or its sequence is preempted ──▶ host ── copy ──▶ disk
    device ◀── LOAD, when a sequence begins with that block ── host ◀── read, while the sequence waits ── disk

The SAVEs and LOADs go to the runners as `Move`s, in the order in which they are decided here. A move holds its slot
until the plan that it stands in has run (`done`); a transfer to or from the disk holds its slot until it is over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from octavo.engine.disk_tier import MAX_QUEUED_WRITES, DiskTier, Transfer
from octavo.engine.host_tier import HostTier
from octavo.engine.messages import OffloadCounts, Stats
from octavo.engine.pages import ELSEWHERE, FREED, NOTHING, BlockTables, KVBlocks, Start
from octavo.engine.plan import COPY, LOAD, SAVE, Move
from octavo.engine.prefix import ChainKeys
from octavo.engine.speed import SpeedModel

log = logging.getLogger(__name__)


class HostMemory(Protocol):
    """The slots' memory, which the executor has. One entry for each KV group."""

    num_slots: tuple[int, ...]
    block_bytes: tuple[int, ...]

    def view(self, group: int, slot: int) -> memoryview:
        """The bytes of a slot."""

    def probe(self) -> tuple[int, float]:
        """(bytes, seconds) of a few moves, before anything is kept."""


@dataclass(eq=False)
class Swapped:
    """What a preempted sequence keeps: the blocks of its first `num_tokens` tokens, from `first_block` on, in slots of
    its own; those before are the prefix cache's to keep."""

    num_tokens: int
    first_block: int
    slots: list[list[int]]
    """for each KV group; FREED where a window no longer reaches"""


@dataclass(eq=False)
class Fetch:
    """Blocks on their way from disk for a sequence that waits for them."""

    transfers: list[Transfer]

    @property
    def done(self) -> bool:
        return all(transfer.done for transfer in self.transfers)


class _NoMemory:
    """`HostMemory` without a slot."""

    def __init__(self, num_groups: int) -> None:
        self.num_slots = self.block_bytes = (0,) * num_groups

    def view(self, group: int, slot: int) -> memoryview:
        raise AssertionError("there is no slot")

    def probe(self) -> tuple[int, float]:
        return 0, 0.0


class Tiers:
    """One a scheduler, for its `blocks`. `moves` is the list that the next plan will carry."""

    def __init__(
        self, blocks: KVBlocks, moves: list[Move], speed: SpeedModel, memory: HostMemory | None = None,
        disk: DiskTier | None = None,
    ) -> None:  # fmt: skip
        self.blocks, self.moves, self.speed, self.disk = blocks, moves, speed, disk
        self.memory = memory or _NoMemory(len(blocks.pools))
        self.hosts = [HostTier(count) for count in self.memory.num_slots]
        self.counts = OffloadCounts()
        self._transfers: set[Transfer] = set()
        """on their way; they hold their slots"""
        for group, pool in enumerate(blocks.pools if self.hosts[0].num_slots else ()):
            pool.on_evict = lambda block, key, group=group: self._evicted(group, block, key)

    # -- blocks that the device gives up, and takes back ---------------------------------------------------------------

    def _evicted(self, group: int, block: int, key: bytes) -> None:
        if self.hosts[group].find(key) is None:
            self._save(group, block, key)

    def _save(self, group: int, block: int, key: bytes | None = None) -> int | None:
        slot = self.hosts[group].take(key)
        if slot is None:
            self.counts.stores_skipped += 1
            return None
        self.moves.append(Move(SAVE, group, block, slot))
        return slot

    def on_host(self, group: int, key: bytes) -> bool:
        return self.hosts[group].find(key) is not None

    def anywhere(self, group: int, key: bytes) -> bool:
        return self.on_host(group, key) or self._on_disk(group, key)

    def _on_disk(self, group: int, key: bytes) -> bool:
        return self.disk is not None and self.disk.has(group, key, self.memory.block_bytes[group])

    def begin(
        self, held: BlockTables, start: Start, keys: ChainKeys | None, swapped: Swapped | None = None
    ) -> set[int]:
        """Gives empty tables what `start` names, as `KVBlocks.begin` does, and plans the loading of what is elsewhere.

        `start` is that of `resume` for a swapped sequence, which is no longer swapped after it. Returns the indices of
        blocks that are loaded.
        """
        sources = {place: self._source(*place, keys, swapped) for place in _elsewhere(start)}
        for (group, _), slot in sources.items():
            self.hosts[group].share(slot)  # making room for it must not cost it
        copies, to_load = self.blocks.begin(held, start)
        self.moves += copies
        for place in to_load:
            group, index = place
            block = held.tables[group][index]
            self.moves.append(Move(LOAD, group, sources[place], block))
            if keys is not None and (swapped is None or index < swapped.first_block):
                self.blocks.pools[group].register([block], [keys[index]])
        if swapped is not None:
            held.num_registered = swapped.first_block
            self.drop(swapped)
        return {index for _, index in to_load}

    def _source(self, group: int, index: int, keys: ChainKeys | None, swapped: Swapped | None) -> int:
        if swapped is not None and index >= swapped.first_block:
            return swapped.slots[group][index - swapped.first_block]
        assert keys is not None, "what has no key was found by one"
        slot = self.hosts[group].find(keys[index])
        assert slot is not None, "a block was found on the host, and is not there"
        return slot

    def done(self, moves: Sequence[Move], seconds: float) -> None:
        """The plan that held these moves has run; they took `seconds`."""
        if not moves:
            return
        sizes, counts = self.memory.block_bytes, self.counts
        num_bytes = sum(sizes[move.group] for move in moves) or 1
        if seconds:
            self.speed.host.note(num_bytes, seconds)
        for move in reversed(moves):  # the ends of what was loaded are given up before its beginnings
            size = sizes[move.group]
            if move.kind == SAVE:
                counts.store_bytes += size
                counts.store_s += seconds * size / num_bytes
                self._write_behind(move.group, move.target)
                self.hosts[move.group].release(move.target)
            elif move.kind == LOAD:
                counts.load_bytes += size
                counts.load_s += seconds * size / num_bytes
                self.hosts[move.group].release(move.source)

    # -- preemption ----------------------------------------------------------------------------------------------------

    def swap_out(self, held: BlockTables, num_tokens: int) -> Swapped | None:
        """Saves what the prefix cache will not keep of the first `num_tokens` tokens, before `held` is released.

        None where what later tokens need is freed (after a step that failed), computing it again is cheaper, or slots
        are short.
        """
        first, end = held.num_registered, -(-num_tokens // self.blocks.layout.page_size)
        if not (num_tokens and self.hosts[0].num_slots) or self.blocks.trimmed_too_far(held, num_tokens):
            return None
        if end == first:
            return Swapped(num_tokens, first, [[] for _ in self.hosts])
        tails = [table[first:end] for table in held.tables]
        counts = [sum(block != FREED for block in tail) for tail in tails]
        num_bytes = sum(n * size for n, size in zip(counts, self.memory.block_bytes, strict=True))
        choice = self.speed.swap(num_tokens - first * self.blocks.layout.page_size, num_bytes)
        room = all(n <= host.num_takeable for n, host in zip(counts, self.hosts, strict=True))
        log.debug("preempted at %d tokens, %d bytes to save: %s%s", num_tokens, num_bytes, choice, "" if room else
                  ", but the host is full")  # fmt: skip
        if not (choice.move and room):
            return None
        slots = [[self._save_own(group, block) for block in tail] for group, tail in enumerate(tails)]
        return Swapped(num_tokens, first, slots)

    def _save_own(self, group: int, block: int) -> int:
        if block == FREED:
            return FREED
        slot = self._save(group, block)
        assert slot is not None, "slots were counted, and are not there"
        self.hosts[group].share(slot)  # once for the move, once for the sequence
        return slot

    def resume(self, swapped: Swapped, keys: ChainKeys | None) -> Start | None:
        """All of its tokens, from the prefix cache and its own slots; None where the cache has lost some."""
        before = swapped.first_block * self.blocks.layout.page_size
        start = NOTHING if keys is None else self.blocks.find(keys, before, self.on_host)
        if start.num_tokens != before:
            return None
        mine = [[FREED if slot == FREED else ELSEWHERE for slot in slots] for slots in swapped.slots]
        first = start.tables or [[] for _ in mine]
        tables = [f + m for f, m in zip(first, mine, strict=True)]
        self.blocks.free_unseen(tables, swapped.num_tokens)
        return Start(swapped.num_tokens, tables)

    def drop(self, swapped: Swapped) -> None:
        """Its sequence goes on, ends, or is computed again."""
        for host, slots in zip(self.hosts, swapped.slots, strict=True):
            for slot in slots:
                if slot != FREED:
                    host.release(slot)

    # -- the disk ------------------------------------------------------------------------------------------------------

    def _write_behind(self, group: int, slot: int) -> None:
        """Copies a slot that has just been filled to the disk, unless it is there."""
        key, size = self.hosts[group].key_of(slot), self.memory.block_bytes[group]
        if self.disk is None or key is None or not self.disk.wants(group, key, size):
            return
        transfer = Transfer(True, group, key, slot, self.memory.view(group, slot))
        if self.disk.write(transfer):
            self.hosts[group].share(slot)
            self._transfers.add(transfer)
        else:
            self.counts.disk_writes_dropped += 1

    def fetch(self, start: Start, keys: ChainKeys, num_here: int) -> Fetch | None:
        """Begins to read what `start`, found `anywhere`, has on disk; None where that is not worth its time.

        `num_here`: tokens that need no reading.
        """
        wanted = [(group, index) for group, index in _elsewhere(start) if not self.on_host(group, keys[index])]
        num_bytes = sum(self.memory.block_bytes[group] for group, _ in wanted)
        choice = self.speed.read(start.num_tokens - num_here, num_bytes)
        log.debug("%d tokens lie on disk: %s", start.num_tokens - num_here, choice)
        if self.disk is None or not wanted or not choice.move:
            return None
        transfers: list[Transfer] = []
        for group, index in sorted(wanted, key=lambda place: place[1]):
            slot = self.hosts[group].take()
            if slot is None:
                break
            transfer = Transfer(False, group, keys[index], slot, self.memory.view(group, slot))
            transfers.append(transfer)
            self._transfers.add(transfer)
            self.disk.read(transfer)
        return Fetch(transfers) if transfers else None

    def keep_for_next_start(self) -> None:
        """Plans to save what the device remembers and the disk has not, as much as may wait to be written."""
        for group, pool in enumerate(self.blocks.pools if self.disk is not None else ()):
            for block, key in islice(pool.newest(), MAX_QUEUED_WRITES // len(self.hosts)):
                if not self.anywhere(group, key):
                    self._save(group, block, key)

    def poll(self) -> None:
        """Takes in what the disk has done. A block that was read can be found on the host from now on."""
        for transfer in [] if self.disk is None else self.disk.finished():
            self._transfers.discard(transfer)
            self._count(transfer)
            host = self.hosts[transfer.group]
            if transfer.write:
                host.release(transfer.slot)
                continue
            if transfer.ok and host.find(transfer.key) is None:
                host.name(transfer.slot, transfer.key)
            if transfer.abandoned:
                host.release(transfer.slot)

    def _count(self, transfer: Transfer) -> None:
        counts, size = self.counts, len(transfer.content) * transfer.ok
        if transfer.write:
            counts.disk_write_bytes += size
            counts.disk_write_s += transfer.seconds
            return
        self.speed.disk.note(len(transfer.content), transfer.seconds)
        counts.disk_read_bytes += size
        counts.disk_read_s += transfer.seconds
        counts.disk_read_failures += not transfer.ok

    def sources(
        self, num_tokens: int, loaded: set[int], fetch: Fetch | None, keys: ChainKeys | None
    ) -> Iterator[tuple[str, int]]:
        """(device, host or disk; how many of the first `num_tokens` tokens came from there), where not 0.

        `loaded`: indices of blocks that `begin` loads; `fetch`: what was read for them.
        """
        size = self.blocks.layout.page_size
        read = {transfer.key for transfer in fetch.transfers if transfer.ok} if fetch is not None else set()
        lying = {i: min(size, num_tokens - i * size) for i in loaded if i * size < num_tokens}
        disk = sum(count for i, count in lying.items() if keys is not None and keys[i] in read)
        host = sum(lying.values()) - disk
        counts = (("device", num_tokens - host - disk), ("host", host), ("disk", disk))
        yield from ((source, count) for source, count in counts if count)

    def end_fetch(self, fetch: Fetch) -> None:
        """Whoever waited has begun, or ended: what was read is the host's, as any other block."""
        for transfer in reversed(fetch.transfers):
            if transfer.done:
                self.hosts[transfer.group].release(transfer.slot)
            else:
                transfer.abandoned = True

    # -- state ---------------------------------------------------------------------------------------------------------

    def fill_in(self, stats: Stats) -> None:
        if not self.hosts[0].num_slots:
            return
        stats.offload = self.counts
        stats.host_blocks_used = sum(host.num_used for host in self.hosts)
        stats.host_blocks_total = sum(host.num_slots for host in self.hosts)
        stats.disk_bytes_used = 0 if self.disk is None else self.disk.num_bytes

    def check_integrity(self, in_flight: Iterable[Move], swapped: Iterable[Swapped], fetches: Iterable[Fetch]) -> None:
        """Raises AssertionError unless each slot is held exactly by these: moves that have not run (those of `moves`
        are known here), preempted sequences, and transfers."""
        held: list[list[int]] = [[] for _ in self.hosts]
        for move in (*in_flight, *self.moves):
            if move.kind != COPY:
                held[move.group].append(move.target if move.kind == SAVE else move.source)
        for one in swapped:
            for group, slots in enumerate(one.slots):
                held[group] += [slot for slot in slots if slot != FREED]
        for transfer in (*self._transfers, *(t for fetch in fetches for t in fetch.transfers if t.done)):
            held[transfer.group].append(transfer.slot)
        for host, slots in zip(self.hosts, held, strict=True):
            host.check_integrity(slots)


def _elsewhere(start: Start) -> Iterator[tuple[int, int]]:
    """(KV group, index) of the blocks that are not on the device."""
    for group, table in enumerate(start.tables):
        yield from ((group, index) for index, block in enumerate(table) if block == ELSEWHERE)
