"""Every sequence there is: how it comes, where it stands, and how it ends. No torch.

It is in exactly one place: `running` (holds blocks) or `waiting` (holds none), both in the order (priority, arrival).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.engine.adapters import LoadedAdapter, find
from octavo.engine.beams import BeamGroup
from octavo.engine.disk_tier import DiskTier
from octavo.engine.intake import Name, Queue, check_request, seed_source
from octavo.engine.messages import Stats
from octavo.engine.pages import KVBlocks, KVLayout
from octavo.engine.plan import Move, StepPlan
from octavo.engine.sequence import Sequence, adapter_names
from octavo.engine.speed import SpeedModel
from octavo.engine.starts import keys_of
from octavo.engine.stopping import why_done
from octavo.engine.tiers import HostMemory, Tiers
from octavo.engine.types import Request, TokenEvent
from octavo.errors import InvalidRequest, OctavoError, to_wire
from octavo.wire.metric_names import ITERATION_BUCKETS

Events = list[tuple[str, TokenEvent]]
"""client id and event"""


@dataclass(frozen=True)
class InFlight:
    """A plan that is not committed yet; for each of its chunks the sequence, and the epoch it was in."""

    plan: StepPlan
    sequences: list[tuple[Sequence, int]]


class Roster:
    """What the scheduler plans with. Each choice of a request that came gets exactly one last event."""

    def __init__(
        self, layout: KVLayout, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
        vocab_size: int, eos_token_ids: Iterable[int], seed: int = 0, policy: str = "fcfs",
        long_prefill_token_threshold: int = 0, max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None, enable_prefix_caching: bool = True,
        host: HostMemory | None = None, disk: DiskTier | None = None,
    ) -> None:  # fmt: skip
        self.blocks = KVBlocks(layout)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.by_priority = policy == "priority"
        self.longest_chunk = min(long_prefill_token_threshold or max_num_batched_tokens, max_num_batched_tokens)
        self.prefix_caching = enable_prefix_caching
        self.queue = Queue(max_num_queued_reqs, max_num_queued_tokens)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.paused_clients: frozenset[str] = frozenset()
        """their sequences are not scheduled, and are the first to give up blocks; set by the core"""
        self.held_back: Collection[Name] = ()
        """requests that may not start yet, as their grammar is being compiled; set by the core"""
        self.adapters: Mapping[str, LoadedAdapter] = {}
        """those that requests may name; set by the core"""
        self.stats = Stats(blocks_total=self.blocks.num_blocks, steps_by_tokens=[0] * (len(ITERATION_BUCKETS) + 1))
        self._draw_seed = seed_source(seed)
        self._next_id = self._num_beams = 0
        self._sequences: dict[int, Sequence] = {}
        self._requests: dict[Name, list[Sequence]] = {}
        self._suspect: Name | None = None
        self._in_flight: deque[InFlight] = deque()
        self._removed: list[int] = []
        self._moves: list[Move] = []
        self.tiers = Tiers(self.blocks, self._moves, SpeedModel(), host, disk)
        self._timings: dict[Name, tuple[float, float]] = {}

    # -- admission and end ---------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Events:
        """Admits `request.sampling.n` sequences.

        Returns terminal events of choices that carry a complete answer already. Raises InvalidRequest, Overloaded, or
        ModelNotFound for an adapter that is not loaded.
        """
        name = (request.client_id, request.request_id)
        self._check(name, request)
        adapter = find(self.adapters, request.adapter)
        sampling = request.sampling
        seed = self._draw_seed() if sampling.seed is None else sampling.seed
        carried = request.output_token_ids or [[] for _ in range(sampling.n)]
        sequences = self._requests[name] = []
        self.queue.add(name, len(request.prompt_token_ids))
        for choice in range(1 if sampling.use_beam_search else sampling.n):
            sequence = Sequence(
                self._next_id, request, choice, seed, self.blocks.new_tables(), now, request.priority,
                list(carried[choice]),
                prompt_logprobs=[] if sampling.prompt_logprobs is not None and choice == 0 else None,
                adapter=adapter,
            )  # fmt: skip
            if sampling.use_beam_search:
                sequence.group = BeamGroup(request, sequence, self.eos_token_ids, self.max_model_len)
            self._enter(sequence)
        done = [(s, *self._why_done(s)) for s in sequences]
        return [self._finish(s, reason, stop_reason) for s, reason, stop_reason in done if reason is not None]

    def _enter(self, sequence: Sequence) -> None:
        if self.prefix_caching:
            sequence.keys = keys_of(sequence, self.blocks.layout.page_size)
        self._next_id += 1
        self._num_beams += sequence.group is not None
        self._sequences[sequence.sequence_id] = sequence
        self._requests[sequence.request.client_id, sequence.request.request_id].append(sequence)
        insort(self.waiting, sequence, key=key_of)

    def _check(self, name: Name, request: Request) -> None:
        if name in self._requests:
            raise InvalidRequest(
                f"request id {request.request_id} is in use", fix="give each request its own id", param="request_id"
            )
        if request.priority and not self.by_priority:
            raise InvalidRequest(
                f"priority is {request.priority}", limit="0, as requests run first come, first served",
                fix="leave it out, or start with --scheduling-policy priority", param="priority",
            )  # fmt: skip
        check_request(request, self.vocab_size, self.max_model_len, self.max_num_batched_tokens, self.blocks)
        self.queue.check(len(self.waiting), request)

    def abort(self, client_id: str, request_id: str, choices: Iterable[int] | None = None) -> Events:
        """Ends choices of a request (all when None). One that is unknown or over is none of our business."""
        wanted = None if choices is None else set(choices)
        sequences = self._requests.get((client_id, request_id), ())
        group = sequences[0].group if sequences else None
        if group is not None and wanted is not None and not group.open <= wanted:
            return [(client_id, event) for event in group.end("abort", wanted)]
        return self._finish_all([s for s in sequences if group or wanted is None or s.choice in wanted], "abort")

    def drop_client(self, client_id: str) -> None:
        """Ends all that a departed client asked for; there is nobody to tell."""
        self._finish_all([s for s in self._sequences.values() if s.request.client_id == client_id], "abort")

    def expire(self, now: float) -> Events:
        """Ends sequences whose deadline has passed."""
        limited = [s for s in self._sequences.values() if s.request.deadline is not None]
        return self._finish_all([s for s in limited if (s.request.deadline or now) <= now], "abort")

    def end_all(self, error: OctavoError | None = None) -> Events:
        """Ends everything: with error events, or as aborted."""
        return self._finish_all(self._sequences.values(), "abort" if error is None else "error", error)

    def _why_done(self, sequence: Sequence) -> tuple[str | None, int | str | None]:
        room = self.max_model_len - sequence.num_tokens
        return why_done(sequence.request.sampling, sequence.output_token_ids, self.eos_token_ids, room)

    def _finish(
        self, sequence: Sequence, reason: str, stop_reason: int | str | None = None, error: OctavoError | None = None
    ) -> tuple[str, TokenEvent]:
        self._remove(sequence)
        wire: dict[str, Any] | None = None if error is None else to_wire(error)
        event = TokenEvent(
            sequence.request.request_id, sequence.choice, finish_reason=reason, stop_reason=stop_reason, error=wire
        )
        return sequence.request.client_id, event

    def _finish_all(self, sequences: Iterable[Sequence], reason: str, error: OctavoError | None = None) -> Events:
        """Beams end with all of their group, whose open choices each get an event."""
        events: Events = []
        for sequence in list(sequences):
            if sequence.group is not None:
                events += self._end_beams(sequence.group, sequence.group.end(reason, error=error))
            else:
                events.append(self._finish(sequence, reason, error=error))
        return events

    def _end_beams(self, group: BeamGroup, events: list[TokenEvent]) -> Events:
        for member in list(group.members):
            self._remove(member)
        return [(group.request.client_id, event) for event in events]

    def _remove(self, sequence: Sequence) -> None:
        """The one place where a sequence leaves; its caller makes the terminal event."""
        place = self.running if sequence.held.tables[0] else self.waiting
        del place[bisect_left(place, sequence.key, key=key_of)]
        self.blocks.release(sequence.held)
        self._end_fetch(sequence)
        if sequence.swapped is not None:
            self.tiers.drop(sequence.swapped)
        self._removed.append(sequence.sequence_id)
        del self._sequences[sequence.sequence_id]
        if sequence.group is not None:
            sequence.group.leave(sequence)
            self._num_beams -= 1
        name = (sequence.request.client_id, sequence.request.request_id)
        self._requests[name].remove(sequence)
        if not self._requests[name]:
            del self._requests[name]
            self.queue.ended(name)
            if name == self._suspect:
                self._suspect = None

    def _end_fetch(self, sequence: Sequence) -> None:
        if sequence.fetch is not None:
            self.tiers.end_fetch(sequence.fetch)
            sequence.fetch = None

    def _note_timing(self, sequence: Sequence) -> None:
        if sequence.first_scheduled_time is not None:
            name = (sequence.request.client_id, sequence.request.request_id)
            self._timings[name] = (sequence.queued_time, sequence.first_scheduled_time)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def adapters_in_use(self) -> set[int]:
        return {s.adapter.number for s in self._sequences.values() if s.adapter is not None}

    def take_timings(self) -> dict[tuple[str, str], tuple[float, float]]:
        """(queued, first scheduled) in seconds since the epoch, by (client id, request id), of each request whose
        choice 0 has had its first token since the last call."""
        taken, self._timings = self._timings, {}
        return taken

    def snapshot(self) -> Stats:
        self.stats.running, self.stats.waiting = len(self.running), len(self.waiting)
        self.stats.blocks_used = self.blocks.num_used
        self.stats.rejected = dict(self.queue.rejected)
        if self.adapters or self.stats.adapters_running or self.stats.adapters_waiting:
            self.stats.adapters_running, self.stats.adapters_waiting = map(adapter_names, (self.running, self.waiting))
        self.tiers.fill_in(self.stats)
        return self.stats

    def check_integrity(self) -> None:
        """Raises AssertionError when the state contradicts itself. Cost: all blocks and sequences."""
        everyone = list(self._sequences.values())
        assert sorted(self.running + self.waiting, key=key_of) == sorted(everyone, key=key_of), (
            "lost or doubled sequence"
        )
        for place in (self.running, self.waiting):
            assert place == sorted(place, key=key_of), "order lost"
        assert all(s.held.tables[0] for s in self.running), "a running sequence holds no blocks"
        fresh = [s for s in self.waiting if s.swapped is None]
        assert not any(any(s.held.tables) for s in self.waiting), "a waiting one holds blocks"
        assert not any(s.num_planned_tokens for s in fresh), "a waiting one has computed, and kept nothing"
        assert not any(s.swapped for s in self.running), "a running one is swapped out"
        assert len(self.running) <= self.max_num_seqs, "too many running"
        assert all(s.num_tokens <= self.max_model_len for s in everyone), "a sequence is too long"
        for s in everyone:
            assert 0 <= s.num_computed_tokens <= s.num_planned_tokens, "planned less than computed"
            assert s.drafting or s.num_planned_tokens <= s.num_expected_tokens, "planned more than there is"
            assert s.num_computed_tokens < s.num_expected_tokens or s.on_hold, (
                "nothing left to compute, and no token came of it"
            )
            assert s.pending <= sum(s is f for flight in self._in_flight for f, _ in flight.sequences), "nothing pends"
        self.queue.check_integrity()
        assert sum(map(len, self._requests.values())) == len(everyone), "requests and sequences differ"
        self.blocks.check_integrity([s.held for s in everyone])
        self.tiers.check_integrity(
            [move for flight in self._in_flight for move in flight.plan.moves],
            [s.swapped for s in everyone if s.swapped], [s.fetch for s in everyone if s.fetch],
        )  # fmt: skip


def key_of(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.key
