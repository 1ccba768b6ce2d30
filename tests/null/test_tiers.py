"""Host slots and disk under random use, with memories that know what each block holds, and plans that run late."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.backends.kv import FullAttention, SlidingWindow
from octavo.engine.disk_tier import Transfer
from octavo.engine.host_tier import HostTier
from octavo.engine.messages import Stats
from octavo.engine.pages import FREED, BlockTables, KVBlocks, KVLayout
from octavo.engine.plan import LOAD, SAVE, Chunk, Move, StepPlan, StepResult
from octavo.engine.prefix import ChainKeys, root_key
from octavo.engine.speed import SpeedModel
from octavo.engine.tiers import Fetch, Swapped, Tiers

FULL, WINDOW = FullAttention(1, 1), SlidingWindow(1, 1, 5)
PAGE = 2
PICK = st.integers(0, 99)
ROOT = root_key(None, None, None)
Block = dict[int, tuple[int, ...]]
"""for each offset written, the tokens that a key there depends on"""


@dataclass
class View:
    """What `Tiers` hands to the disk as a slot's memory."""

    memory: Memory
    group: int
    slot: int

    def __len__(self) -> int:
        return self.memory.block_bytes[self.group]


class Memory:
    """`tiers.HostMemory`, and the device's blocks."""

    def __init__(self, layout: KVLayout, num_slots: int) -> None:
        self.num_slots = (num_slots,) * len(layout.specs)
        self.block_bytes = tuple(10 + group for group in range(len(layout.specs)))
        self.blocks: list[dict[int, Block]] = [{} for _ in layout.specs]
        self.slots: list[dict[int, Block]] = [{} for _ in layout.specs]

    def view(self, group, slot):
        return View(self, group, slot)

    def do(self, move: Move) -> None:
        blocks, slots = self.blocks[move.group], self.slots[move.group]
        if move.kind == SAVE:
            slots[move.target] = dict(blocks.get(move.source, {}))
        elif move.kind == LOAD:
            blocks[move.target] = dict(slots[move.source])


class Disk:
    """`DiskTier` that moves when it is told to."""

    num_bytes = 0

    def __init__(self) -> None:
        self.files: dict[tuple[int, bytes], Block] = {}
        self.queue: list[Transfer] = []
        self.over: list[Transfer] = []
        self.limit = 3

    def has(self, group, key, size):
        return (group, key) in self.files

    def wants(self, group, key, size):
        return not self.has(group, key, size) and all((t.group, t.key) != (group, key) for t in self.queue if t.write)

    def write(self, transfer):
        if sum(t.write for t in self.queue) >= self.limit:
            return False
        self.queue.append(transfer)
        return True

    def read(self, transfer):
        self.queue.append(transfer)

    def finished(self):
        over, self.over = self.over, []
        for transfer in over:
            transfer.done = True
        return over

    def turn(self) -> None:
        transfer = self.queue.pop(0)
        slots, name = transfer.content.memory.slots[transfer.group], (transfer.group, transfer.key)
        if transfer.write:
            self.files[name] = dict(slots[transfer.slot])
        slots[transfer.slot] = {0: (-1,)} if name not in self.files else dict(self.files[name])
        transfer.ok = name in self.files
        self.over.append(transfer)


@dataclass(eq=False)
class Sequence:
    blocks: KVBlocks
    tokens: list[int]
    keys: ChainKeys = field(init=False)
    held: BlockTables = field(init=False)
    num_planned: int = 0
    swapped: Swapped | None = None
    fetch: Fetch | None = None

    def __post_init__(self):
        self.keys = ChainKeys(ROOT, PAGE, self.tokens, [])
        self.held = self.blocks.new_tables()


def build(specs, num_blocks, num_slots, disk=None, speed=None):
    layout = KVLayout(PAGE, tuple(specs), (num_blocks,) * len(specs))
    blocks, memory, moves = KVBlocks(layout), Memory(layout, num_slots), []
    return Tiers(blocks, moves, speed or SpeedModel(), memory, disk), memory


class Machine(RuleBasedStateMachine):
    """Plans run in order, up to two behind. What a sequence reads is checked when its plan runs."""

    @initialize(
        specs=st.sampled_from([(FULL,), (WINDOW,), (FULL, WINDOW)]), num_blocks=st.integers(4, 10),
        num_slots=st.integers(1, 8), disk=st.booleans(), caching=st.booleans(),
    )  # fmt: skip
    def start(self, specs, num_blocks, num_slots, disk, caching):
        self.disk = Disk() if disk else None
        self.tiers, self.memory = build(specs, num_blocks, num_slots, self.disk)
        self.blocks, self.caching = self.tiers.blocks, caching
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.plans: deque[tuple[list[Move], list[tuple]]] = deque()
        self.work: list[tuple] = []
        self.fresh: set[Sequence] = set()
        """began in the plan that is being made, so that they do not leave before it is"""

    @property
    def settled(self):
        return [s for s in self.running if s not in self.fresh]

    def write(self, sequence, begin, end):
        for position in range(begin, end):
            index, offset = divmod(position, PAGE)
            for group, table in enumerate(sequence.held.tables):
                self.work.append(("write", group, table[index], offset, tuple(sequence.tokens[: position + 1])))

    def check(self, sequence):
        """What the token after those planned reads."""
        for group, spec in enumerate(self.blocks.layout.specs):
            window = spec.window if isinstance(spec, SlidingWindow) else sequence.num_planned + 1
            for position in range(max(0, sequence.num_planned - window + 1), sequence.num_planned):
                index, offset = divmod(position, PAGE)
                block = sequence.held.tables[group][index]
                self.work.append(("read", group, block, offset, tuple(sequence.tokens[: position + 1])))

    @rule(kind=st.integers(0, 5), length=st.integers(0, 13), tail=st.lists(st.integers(2, 3), max_size=2))
    def add(self, kind, length, tail):
        """Those of a kind begin alike."""
        sequence = Sequence(self.blocks, [kind, *range(length), *tail])
        self.waiting.append(sequence)
        self.begin(sequence)

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK)
    def try_again(self, pick):
        self.begin(self.waiting[pick % len(self.waiting)])

    def begin(self, sequence):
        swapped, tiers = sequence.swapped, self.tiers
        if sequence.fetch is not None and not sequence.fetch.done:
            return
        if swapped is not None:
            most = swapped.first_block * PAGE
        else:
            most = len(sequence.tokens) - 1 if self.caching else 0
        start = self.blocks.find(sequence.keys, most, tiers.on_host)
        if sequence.fetch is None:
            further = self.blocks.find(sequence.keys, most, tiers.anywhere)
            if further.num_tokens > start.num_tokens:
                sequence.fetch = tiers.fetch(further, sequence.keys, start.num_tokens)
                if sequence.fetch is not None:
                    return
        if swapped is not None and (whole := tiers.resume(swapped, sequence.keys)) is not None:
            start = whole
        elif swapped is not None:
            tiers.drop(swapped)
            swapped = sequence.swapped = None
        if not self.blocks.can_start(len(sequence.tokens), len(sequence.tokens), start=start):
            return
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.fresh.add(sequence)
        tiers.begin(sequence.held, start, sequence.keys, swapped)
        sequence.num_planned, sequence.swapped = start.num_tokens, None
        self.end_fetch(sequence)
        self.check(sequence)

    def end_fetch(self, sequence):
        if sequence.fetch is not None:
            self.tiers.end_fetch(sequence.fetch)
            sequence.fetch = None

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 9), late=st.integers(0, 2), leave=st.booleans())
    def step(self, count, late, leave):
        """Everybody who has room computes `count` tokens; up to `late` plans are left to run. Who is done may leave."""
        for sequence in [s for s in self.settled if leave and s.num_planned == len(s.tokens)]:
            self.running.remove(sequence)
            self.blocks.release(sequence.held)
        for sequence in self.running:
            begin = sequence.num_planned
            self.blocks.trim(sequence.held, begin)
            if self.caching:
                self.blocks.register(sequence.held, sequence.keys, begin)
            end = min(begin + count, len(sequence.tokens))
            if end > begin and self.blocks.extend(sequence.held, end):
                self.check(sequence)
                self.write(sequence, begin, end)
                sequence.num_planned = end
        self.plan()
        while len(self.plans) > late:
            self.run()

    @precondition(lambda self: self.running)
    @rule(pick=PICK, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, pick, tokens):
        self.running[pick % len(self.running)].tokens += tokens

    @precondition(lambda self: any(s.num_planned for s in self.settled))
    @rule(pick=PICK)
    def preempt(self, pick):
        able = [s for s in self.settled if s.num_planned]
        sequence = able[pick % len(able)]
        self.running.remove(sequence)
        self.waiting.append(sequence)
        sequence.swapped = self.tiers.swap_out(sequence.held, sequence.num_planned)
        self.blocks.release(sequence.held)
        sequence.num_planned = 0

    @precondition(lambda self: self.settled or self.waiting)
    @rule(pick=PICK)
    def end(self, pick):
        able = self.settled + self.waiting
        sequence = able[pick % len(able)]
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.end_fetch(sequence)
        if sequence.swapped is not None:
            self.tiers.drop(sequence.swapped)
        self.blocks.release(sequence.held)

    def plan(self):
        self.plans.append((list(self.tiers.moves), self.work))
        self.tiers.moves.clear()
        self.work = []
        self.fresh.clear()

    def run(self):
        moves, work = self.plans.popleft()
        for move in moves:
            self.memory.do(move)
        for verb, group, block, offset, context in work:
            if verb == "write":
                self.memory.blocks[group].setdefault(block, {})[offset] = context
            else:
                assert self.memory.blocks[group][block][offset] == context
        self.tiers.done(moves, 0.001)

    @precondition(lambda self: self.disk is not None and self.disk.queue)
    @rule(count=st.integers(1, 4))
    def turn(self, count):
        for _ in range(min(count, len(self.disk.queue))):
            self.disk.turn()

    @precondition(lambda self: self.disk is not None and self.disk.files)
    @rule(pick=PICK)
    def lose_a_file(self, pick):
        del self.disk.files[list(self.disk.files)[pick % len(self.disk.files)]]

    @rule()
    def poll(self):
        self.tiers.poll()

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "tiers"):
            self.blocks.check_integrity([s.held for s in self.running])
            self.tiers.check_integrity(
                [m for moves, _ in self.plans for m in moves], [s.swapped for s in self.waiting if s.swapped],
                [s.fetch for s in self.waiting if s.fetch],
            )  # fmt: skip

    def teardown(self):
        if not hasattr(self, "tiers"):
            return
        self.plan()
        while self.plans:
            self.run()
        for sequence in [*self.running, *self.waiting]:
            self.end_fetch(sequence)
            if sequence.swapped is not None:
                self.tiers.drop(sequence.swapped)
        while self.disk is not None and self.disk.queue:
            self.disk.turn()
        self.tiers.poll()
        self.tiers.check_integrity([], [], [])


TestTiers = Machine.TestCase
TestTiers.settings = settings(max_examples=100, stateful_step_count=80, deadline=None)


def test_many_random_schedules():
    """Longer ones than hypothesis makes, so that blocks wander through all tiers."""
    seed = random.randrange(1 << 30)
    rng, seen = random.Random(seed), Counter()
    for _ in range(100):
        machine = Machine()
        specs, caching = rng.choice([(FULL,), (WINDOW,), (FULL, WINDOW)]), rng.random() < 0.8
        machine.start(specs, rng.randint(6, 10), rng.randint(2, 10), rng.random() < 0.8, caching)
        for _ in range(200):
            try:
                one_random_thing(machine, rng)
                machine.nothing_is_lost()
            except Exception as err:
                raise AssertionError(f"seed {seed}") from err
        seen.update(loaded=machine.tiers.counts.load_bytes, read=machine.tiers.counts.disk_read_bytes)
        machine.teardown()
    assert seen["loaded"] > 500 and seen["read"] > 100, f"seed {seed}: hardly anything happened"


def one_random_thing(machine: Machine, rng: random.Random) -> None:
    pick = rng.randrange(100)
    chance = rng.random()
    if machine.disk is not None and machine.disk.queue and chance < 0.3:
        machine.turn(rng.randint(1, 4))
        machine.poll()
    elif machine.waiting and chance < 0.5:
        machine.try_again(pick)
    elif machine.running and chance < 0.8:
        machine.step(rng.randint(1, 9), rng.randrange(3), rng.random() < 0.7)
    elif any(s.num_planned for s in machine.settled) and chance < 0.87:
        machine.preempt(pick)
    elif machine.settled and chance < 0.89:
        machine.end(pick)
    elif machine.running and chance < 0.92:
        machine.grow(pick, [rng.randrange(2)])
    elif machine.disk is not None and machine.disk.files and chance < 0.93:
        machine.lose_a_file(pick)
    else:
        machine.add(rng.randrange(6), rng.randrange(14), [rng.randint(2, 3) for _ in range(rng.randrange(3))])


class HostMachine(RuleBasedStateMachine):
    """Against a list in order of use."""

    @initialize(count=st.integers(0, 5))
    def start(self, count):
        self.tier, self.count = HostTier(count), count
        self.held: list[int] = []
        self.kept: list[bytes] = []
        self.named: dict[bytes, int] = {}

    @rule(key=st.none() | st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f", b"g"]))
    def take(self, key):
        if key in self.named:
            assert self.tier.find(key) == self.named[key]
            return
        slot = self.tier.take(key)
        free = self.count - len(set(self.held)) - len(self.kept)
        if slot is None:
            assert free == 0 and not self.kept
            return
        if free == 0:
            assert self.named.pop(self.kept.pop(0)) == slot, "the longest unused goes"
        assert slot not in self.held
        self.held.append(slot)
        if key is not None:
            self.named[key] = slot

    @precondition(lambda self: self.held)
    @rule(data=st.data(), again=st.booleans())
    def hold(self, data, again):
        slot = data.draw(st.sampled_from(self.held))
        if again:
            self.tier.share(slot)
            self.held.append(slot)
            return
        self.tier.release(slot)
        self.held.remove(slot)
        key = next((k for k, s in self.named.items() if s == slot), None)
        if slot not in self.held and key is not None:
            self.kept.append(key)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def share_kept(self, data):
        key = data.draw(st.sampled_from(self.kept))
        self.kept.remove(key)
        self.held.append(self.named[key])
        self.tier.share(self.named[key])

    @invariant()
    def agree(self):
        if hasattr(self, "tier"):
            self.tier.check_integrity(self.held)
            assert self.tier.num_used == len(set(self.held)) + len(self.kept)
            assert all(self.tier.find(key) == slot for key, slot in self.named.items())


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- what is chosen ----------------------------------------------------------------------------------------------------


def computed(tiers, count, tokens):
    sequence = Sequence(tiers.blocks, list(tokens))
    assert tiers.blocks.extend(sequence.held, count)
    return sequence


def test_what_the_prefix_cache_keeps_is_not_saved_again():
    tiers, _ = build((FULL,), 8, 8)
    sequence = computed(tiers, 7, range(9))
    tiers.blocks.register(sequence.held, sequence.keys, 5)
    last = sequence.held.tables[0][2:]
    swapped = tiers.swap_out(sequence.held, 7)
    assert (swapped.num_tokens, swapped.first_block) == (7, 2)
    assert tiers.moves == [Move(SAVE, 0, b, s) for b, s in zip(last, swapped.slots[0], strict=True)]


@pytest.mark.parametrize(("token_s", "byte_s", "swaps"), [(1e-3, 1e-6, True), (1e-6, 1e-3, False), (None, 1, True)])
def test_preemption_takes_the_cheaper_way(token_s, byte_s, swaps):
    speed = SpeedModel()
    speed.host.note(1, byte_s)
    if token_s is not None:
        speed.prefill.note(8, 8 * token_s)
    tiers, _ = build((FULL,), 8, 8, speed=speed)
    sequence = computed(tiers, 7, range(9))
    assert (tiers.swap_out(sequence.held, 7) is not None) == swaps
    assert bool(tiers.moves) == swaps


def test_a_full_host_means_computing_again():
    tiers, _ = build((FULL,), 12, 5)
    one, two = computed(tiers, 6, range(6)), computed(tiers, 6, range(6))
    assert tiers.swap_out(one.held, 6) is not None
    assert tiers.swap_out(two.held, 6) is None
    assert len(tiers.moves) == 3


def test_a_window_saves_what_it_reaches():
    tiers, _ = build((FULL, WINDOW), 12, 12)
    sequence = computed(tiers, 11, range(12))
    tiers.blocks.trim(sequence.held, 11)
    swapped = tiers.swap_out(sequence.held, 11)
    assert [slot == FREED for slot in swapped.slots[1]] == [True] * 3 + [False] * 3
    assert len(tiers.moves) == 6 + 3


def test_only_steps_that_are_mostly_prefill_say_how_fast_it_is():
    speed = SpeedModel()

    def note(lengths, seconds):
        chunks = [Chunk(i, 0, [0] * length, (0,), ([],), False) for i, length in enumerate(lengths)]
        speed.note_step(StepPlan([], [], chunks), StepResult([], {}, seconds=seconds + 1, move_seconds=1.0))

    note([1] * 64, 9.0)
    note([16, *[1] * 17], 9.0)
    assert speed.prefill.seconds_each is None
    note([50, 50, 4], 1.04)
    assert speed.prefill.seconds_each == pytest.approx(0.01)
    for _ in range(80):
        note([100], 2.0)
    assert speed.prefill.seconds_each == pytest.approx(0.02, rel=0.01), "old observations are forgotten"
    assert "an unknown time, computing 2" in str(speed.swap(10, 100))


def test_counts_say_what_went_where():
    disk = Disk()
    tiers, memory = build((FULL,), 2, 4, disk)
    sequence = computed(tiers, 4, range(4))
    tiers.blocks.register(sequence.held, sequence.keys, 4)
    tiers.blocks.release(sequence.held)
    other = computed(tiers, 4, range(50, 54))
    moves = list(tiers.moves)
    assert [move.kind for move in moves] == [SAVE, SAVE]
    tiers.moves.clear()
    for move in moves:
        memory.do(move)
    tiers.done(moves, 0.5)
    tiers.blocks.release(other.held)
    while disk.queue:
        disk.turn()
    tiers.poll()
    stats = Stats()
    tiers.fill_in(stats)
    assert (stats.host_blocks_used, stats.host_blocks_total) == (2, 4)
    assert (stats.offload.store_bytes, stats.offload.store_s, stats.offload.disk_write_bytes) == (20, 0.5, 20)
