"""Block tables, pools and the prefix cache under random use, with a memory that knows what each block holds."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.backends.kv import FullAttention, SlidingWindow
from octavo.engine.pages import ELSEWHERE, FREED, NOTHING, BlockTables, KVBlocks, KVLayout, Start
from octavo.engine.plan import COPY, Move
from octavo.engine.pool import BlockPool
from octavo.engine.prefix import ChainKeys, root_key

FULL, WINDOW, NARROW = FullAttention(1, 1), SlidingWindow(1, 1, 5), SlidingWindow(1, 1, 1)
ROOTS = [root_key(salt, adapter, None) for salt in (None, "salt") for adapter in (None, b"adapter")]


class Tokens:
    """A sequence as these tests need it."""

    def __init__(self, blocks: KVBlocks, tokens: list[int], root: bytes = ROOTS[0]) -> None:
        self.blocks, self.tokens, self.root = blocks, tokens, root
        self.keys = ChainKeys(root, blocks.layout.page_size, self.tokens, [])
        self.held = blocks.new_tables()
        self.num_computed = 0

    def compute(self, count: int) -> bool:
        """As one step does: room, the tokens, and registration of what they fill."""
        self.blocks.trim(self.held, self.num_computed)
        end = self.num_computed + count
        if not self.blocks.extend(self.held, end):
            return False
        assert self.blocks.may_write(self.held, self.num_computed, end)
        self.num_computed = end
        self.blocks.register(self.held, self.keys, end)
        return True

    def begin(self, start: Start) -> list[Move]:
        moves, to_load = self.blocks.begin(self.held, start)
        assert not to_load
        self.num_computed = start.num_tokens
        return moves


def blocks_of(num_blocks: int, *specs: FullAttention, page_size: int = 2) -> KVBlocks:
    return KVBlocks(KVLayout(page_size, specs or (FULL,), (num_blocks,) * (len(specs) or 1)))


def test_a_prefix_is_found_in_full_blocks_only_and_under_its_own_salt():
    blocks = blocks_of(8)
    first = Tokens(blocks, [1, 2, 3, 4, 5])
    assert first.compute(5)
    again = Tokens(blocks, [1, 2, 3, 4, 5])
    assert blocks.find(again.keys, 5) == Start(4, [first.held.tables[0][:2]])
    assert blocks.find(again.keys, 3) == Start(2, [first.held.tables[0][:1]])
    assert blocks.find(Tokens(blocks, [1, 2, 9, 4, 5]).keys, 5).num_tokens == 2
    assert blocks.find(Tokens(blocks, [1, 2, 3, 4, 5], ROOTS[1]).keys, 5).num_tokens == 0
    assert len({*ROOTS, root_key(None, None, b"image"), root_key("", None, None)}) == 6


def test_ends_are_given_up_before_beginnings_and_old_before_new():
    blocks = blocks_of(6)
    lost = []
    blocks.pools[0].on_evict = lambda block, key: lost.append(key)
    old, new = Tokens(blocks, [1, 1, 2, 2, 3, 3]), Tokens(blocks, [4, 4, 5, 5])
    for sequence, count in ((old, 6), (new, 4)):
        assert sequence.compute(count)
        blocks.release(sequence.held)
    assert Tokens(blocks, list(range(50, 58))).compute(8)
    assert lost == [old.keys[2], old.keys[1], old.keys[0]], "one of the four blocks was blank"
    assert blocks.find(new.keys, 4).num_tokens == 4


def test_finding_takes_a_block_out_of_the_order_of_eviction():
    blocks = blocks_of(3)
    first, second = Tokens(blocks, [1, 1]), Tokens(blocks, [2, 2])
    for sequence in (first, second):
        assert sequence.compute(2)
        blocks.release(sequence.held)
    again = Tokens(blocks, [1, 1, 3])
    again.begin(blocks.find(again.keys, 2))
    blocks.release(again.held)
    assert Tokens(blocks, [7, 7, 8, 8]).compute(4)
    assert blocks.find(first.keys, 2).num_tokens == 2
    assert blocks.find(second.keys, 2).num_tokens == 0


def test_a_window_needs_only_what_it_reaches():
    blocks = blocks_of(12, FULL, WINDOW)
    first = Tokens(blocks, list(range(14)))
    for _ in range(14):
        assert first.compute(1)
    assert first.held.trimmed == [0, 4], "the token at 13 sees from 9 on"
    again = Tokens(blocks, first.tokens)
    start = blocks.find(again.keys, 13)
    assert start.num_tokens == 12
    assert start.tables[1] == [FREED] * 4 + first.held.tables[1][4:6]
    again.begin(start)
    assert again.held.trimmed == [0, 4]
    blocks.check_integrity([first.held, again.held])
    blocks.pools[1].take(blocks.pools[1].num_free)
    assert blocks.find(again.keys, 11).num_tokens == 0, "the windows of shorter starts are evicted"


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (FULL, WINDOW), (NARROW, WINDOW, FULL)])
def test_the_longest_start_is_found_whatever_is_missing(specs):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    for _ in range(200):
        page_size, most = rng.randint(1, 3), rng.randint(0, 20)
        blocks = blocks_of(4, *specs, page_size=page_size)
        keys = Tokens(blocks, list(range(20))).keys
        share = rng.choice([0.5, 0.8, 0.95])
        there = [{keys[i] for i in range(20 // page_size) if rng.random() < share} for _ in specs]

        def whole(end, there=there, keys=keys, size=page_size):
            reach = [s.window - 1 if isinstance(s, SlidingWindow) else end * size for s in specs]
            return all(keys[p // size] in t for t, r in zip(there, reach, strict=True) for p in range(end * size)
                       if p >= end * size - r)  # fmt: skip

        longest = max(end for end in range(most // page_size + 1) if whole(end))
        start = blocks.find(keys, most, elsewhere=lambda group, key, there=there: key in there[group])
        assert start.num_tokens == longest * page_size, f"seed {seed}"


def test_keys_are_computed_once_somebody_may_ask_for_them():
    blocks = blocks_of(6)
    first, other, again = (Tokens(blocks, tokens) for tokens in ([1, 1, 2, 2, 3, 3], [5, 5, 2, 2], [1, 1, 2, 2, 7]))
    assert first.compute(6)
    assert len(first.keys._keys) == 1
    assert blocks.find(other.keys, 4).num_tokens == 0
    assert len(first.keys._keys) == 1, "another beginning: nothing of it can be found"
    assert blocks.find(again.keys, 4).num_tokens == 4
    assert len(first.keys._keys) == 3
    other.keys.follow(Tokens(blocks, [5, 5]).keys, 2)
    assert other.compute(4)
    for sequence in (first, other):
        blocks.release(sequence.held)
    last = Tokens(blocks, list(range(50, 62)))
    assert last.compute(12)
    assert list(blocks._unsettled) == [last.keys[0]], "what lost its first block is forgotten"


def test_keys_taken_over_are_the_same_and_none_is_lost():
    blocks = blocks_of(1)
    long, short, fresh = (Tokens(blocks, [1, 2, 3, 4, 5, 6]).keys for _ in range(3))
    wanted = [fresh[i] for i in range(3)]
    assert (long[1], short[0]) == (wanted[1], wanted[0])
    long.follow(short, 2)
    short.follow(long, 2)
    assert [short[i] for i in range(3)] == [long[i] for i in range(3)] == wanted


def test_two_that_compute_the_same_keep_their_own_blocks():
    blocks = blocks_of(8)
    one, two = Tokens(blocks, [1, 2, 3]), Tokens(blocks, [1, 2, 3])
    assert one.compute(3)
    assert two.compute(3)
    assert one.held.tables[0][0] != two.held.tables[0][0]
    assert blocks.find(two.keys, 2).tables == [one.held.tables[0][:1]]
    blocks.release(two.held)
    assert blocks.pools[0].num_remembered == 0, "the unregistered twin is blank at once"
    assert blocks.num_used == 2


@pytest.mark.parametrize(("at", "shared", "copied"), [(1, 0, True), (2, 1, False), (3, 1, True), (4, 2, False)])
def test_a_fork_shares_full_blocks_and_copies_the_last(at, shared, copied):
    blocks = blocks_of(8, FULL, WINDOW)
    leader = Tokens(blocks, [1, 2, 3, 4, 5])
    assert leader.compute(4)
    held, moves = blocks.fork(leader.held, at)
    tables = leader.held.tables
    assert [t[:shared] for t in held.tables] == [t[:shared] for t in tables]
    assert moves == [Move(COPY, g, tables[g][shared], held.tables[g][shared]) for g in range(2) if copied]
    blocks.check_integrity([leader.held, held])


def test_no_fork_of_what_is_out_of_reach():
    blocks = blocks_of(8, WINDOW)
    leader = Tokens(blocks, list(range(12)))
    for _ in range(11):
        assert leader.compute(1)
    assert blocks.start_of(leader.held, 10) is not None
    assert blocks.start_of(leader.held, 5) is None


def test_what_lies_elsewhere_is_given_blocks_to_load_into():
    blocks = blocks_of(4)
    sequence = Tokens(blocks, [1, 2, 3, 4, 5])
    start = blocks.find(sequence.keys, 4, elsewhere=lambda group, key: key == sequence.keys[1])
    assert start == Start(0, [[]]), "the first block is nowhere"
    assert Tokens(blocks, [1, 2]).compute(2)
    start = blocks.find(sequence.keys, 4, elsewhere=lambda group, key: key == sequence.keys[1])
    assert start == Start(4, [[0, ELSEWHERE]])
    assert blocks.can_start(5, 8, start=start)
    assert not blocks.can_start(10, 8, start=start)
    assert blocks.begin(sequence.held, start) == ([], [(0, 1)])
    assert sequence.held.tables == [[0, 1]]


def test_room_counts_what_others_hold_as_given_and_what_is_remembered_as_taken():
    blocks = blocks_of(4)
    first = Tokens(blocks, [1, 2, 3, 4])
    assert first.compute(4)
    again = Tokens(blocks, [1, 2, 3, 4, *range(10)])
    assert blocks.can_start(8, 8, start=blocks.find(again.keys, 4))
    assert not blocks.can_start(8, 8)
    blocks.release(first.held)
    start = blocks.find(again.keys, 4)
    assert blocks.can_start(8, 8, start=start)
    assert not blocks.can_start(8, 8, [1], start)
    assert not blocks.can_start(9, 8, start=start)


def test_misuse_of_a_pool_is_noticed():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.register([block], [b"a"])
    assert not pool.may_write(block)
    with pytest.raises(AssertionError, match="changed"):
        pool.register([block], [b"b"])
    pool.release([block])
    for wrong in (pool.release, lambda blocks: pool.register(blocks, [b"c"])):
        with pytest.raises(AssertionError, match="free block"):
            wrong([block])
    with pytest.raises(AssertionError, match="holds nothing"):
        pool.share(1)
    with pytest.raises(AssertionError, match="more blocks"):
        pool.take(3)


class Cache(RuleBasedStateMachine):
    """Sequences begin, compute, fork and end; each must read, from every block in reach, its own tokens."""

    @initialize(
        blocks=st.integers(4, 12), page_size=st.sampled_from([1, 2, 3]),
        specs=st.sampled_from([(FULL,), (WINDOW, FULL), (WINDOW,), (FULL, WINDOW, NARROW)]),
    )  # fmt: skip
    def start(self, blocks, page_size, specs):
        self.blocks = blocks_of(blocks, *specs, page_size=page_size)
        self.memory: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in specs]
        self.live: list[Tokens] = []
        self.evicted: dict[int, set[bytes]] = defaultdict(set)
        for group, pool in enumerate(self.blocks.pools):
            pool.on_evict = lambda block, key, group=group: self.evicted[group].add(key)

    def apply(self, moves: list[Move]) -> None:
        for move in moves:
            for offset in range(self.blocks.layout.page_size):
                found = self.memory[move.group].get((move.source, offset))
                self.memory[move.group][move.target, offset] = found or ()

    def context(self, sequence: Tokens, position: int) -> tuple[int, ...]:
        """What a correct key and value at `position` depend on."""
        return (ROOTS.index(sequence.root), *sequence.tokens[: position + 1])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16), root=st.sampled_from(ROOTS), hit=st.booleans())
    def add(self, tokens, root, hit):
        sequence = Tokens(self.blocks, tokens, root)
        start = self.blocks.find(sequence.keys, len(tokens) - 1) if hit else NOTHING
        assert start.num_tokens < len(tokens)
        if self.blocks.can_start(len(tokens), len(tokens), start=start):
            assert sequence.begin(start) == []
            self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data, count):
        sequence = data.draw(st.sampled_from(self.live))
        begin = sequence.num_computed
        if sequence.compute(min(count, len(sequence.tokens) - begin)):
            for position in range(begin, sequence.num_computed):
                block, offset = divmod(position, self.blocks.layout.page_size)
                for group, table in enumerate(sequence.held.tables):
                    self.memory[group][table[block], offset] = self.context(sequence, position)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4))
    def fork(self, data, more):
        leader = data.draw(st.sampled_from(self.live))
        at = data.draw(st.integers(0, leader.num_computed))
        start = self.blocks.start_of(leader.held, at)
        if start is not None and self.blocks.can_start(at + 1, 1, start=start):
            child = Tokens(self.blocks, [*leader.tokens[:at], *more], leader.root)
            child.keys.follow(leader.keys, at // self.blocks.layout.page_size)
            self.apply(child.begin(start))
            self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, data, tokens):
        data.draw(st.sampled_from(self.live)).tokens += tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.blocks.release(sequence.held)

    @invariant()
    def everyone_reads_his_own(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity([s.held for s in self.live])
        size = self.blocks.layout.page_size
        for sequence in self.live:
            for group, spec in enumerate(self.blocks.layout.specs):
                window = spec.window if isinstance(spec, SlidingWindow) else sequence.num_computed + 1
                for position in range(max(0, sequence.num_computed - window + 1), sequence.num_computed):
                    place = sequence.held.tables[group][position // size], position % size
                    assert self.memory[group][place] == self.context(sequence, position)

    def teardown(self):
        if hasattr(self, "blocks"):
            for sequence in self.live:
                self.blocks.release(sequence.held)
            self.blocks.check_integrity([])
            assert self.blocks.num_used == 0


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_nothing_begins_with_nothing():
    held = BlockTables([[]], [0])
    assert blocks_of(1).begin(held, NOTHING) == ([], [])
    assert held == BlockTables([[]], [0])
