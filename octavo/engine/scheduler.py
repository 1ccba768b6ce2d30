"""Decides what each step computes. No torch; neither `plan` nor `commit` reads the device.

Every sequence is in exactly one place: `running` (holds blocks) or `waiting` (holds none); both are kept in the order
(priority, arrival). There is no prefill or decode: a step gives each running sequence, under one token budget, what it
lacks, and then lets waiting ones in. When blocks run out, the running sequence that is last in order gives its blocks
back and waits to be computed again, with the tokens that it has generated. So the first in order always advances, and
nothing is dropped.

A plan may be made while the step before it runs (see `sequence`); steps are committed in the order of their plans.
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
from octavo.engine.pages import KVBlocks, KVLayout, Start
from octavo.engine.plan import Chunk, Move, Sampled, StepPlan, StepResult
from octavo.engine.sequence import Sequence, adapter_names
from octavo.engine.speed import SpeedModel
from octavo.engine.starts import keys_of, start_of
from octavo.engine.stopping import no_token, not_a_number, why_done
from octavo.engine.tiers import HostMemory, Tiers
from octavo.engine.types import Request, TokenEvent, TokenLogprobs
from octavo.errors import InvalidRequest, OctavoError, to_wire
from octavo.wire.metric_names import ITERATION_BUCKETS

Events = list[tuple[str, TokenEvent]]
"""client id and event"""


@dataclass(frozen=True)
class _InFlight:
    """A plan that is not committed yet; for each of its chunks the sequence, and the epoch it was in."""

    plan: StepPlan
    sequences: list[tuple[Sequence, int]]


class Scheduler:
    """`add` and `abort` at any time; `plan`, run the plan, `commit` (or `fail`); the next plan may come before it."""

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
        self._in_flight: deque[_InFlight] = deque()
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
        insort(self.waiting, sequence, key=_key)

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

    # -- a step --------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """What to compute next; without chunks when nothing can run. Takes blocks and may preempt."""
        self.tiers.poll()
        chunks: list[Chunk] = []
        if self.by_priority and self._suspect is None:
            self._yield_to_urgent()
        budget, enough_room = self._plan_running(chunks)
        if enough_room and self._suspect is None:
            self._plan_waiting(chunks, budget, now)
        if not chunks:
            return StepPlan([], [], [])
        sequences = [self._sequences[chunk.sequence_id] for chunk in chunks]
        added = [s.introduction() for s in sequences if not s.known_to_runners]
        plan = StepPlan(self._removed, added, chunks, list(self._moves))
        self._removed = []
        self._moves.clear()
        self._in_flight.append(_InFlight(plan, [(s, s.epoch) for s in sequences]))
        return plan

    def _plan_running(self, chunks: list[Chunk]) -> tuple[int, bool]:
        """Returns the budget that is left, and whether blocks sufficed without preemption."""
        budget, preemptions = self.max_num_batched_tokens, self.stats.preemptions
        for sequence in list(self.running):
            if budget == 0:
                break
            if not sequence.held.tables[0]:
                continue  # preempted by one before it in this very step
            if sequence.drafting or not self._may_run(sequence):
                continue
            missing = sequence.num_expected_tokens - sequence.num_planned_tokens
            length = min(missing, budget, self.longest_chunk)
            room = sequence.room_to_sample(self.max_model_len)
            if length == 0 or room <= 0:
                continue  # what it lacks is under way
            drafts = 0
            if sequence.draft_token_ids and length == missing:
                drafts = min(len(sequence.draft_token_ids), room - 1, budget - length)
            if self._make_room(sequence, sequence.num_planned_tokens + length + drafts):
                chunks.append(sequence.plan_chunk(length, drafts))
                budget -= length + drafts
        return budget, preemptions == self.stats.preemptions

    def _may_run(self, sequence: Sequence) -> bool:
        request = sequence.request
        paused = request.client_id in self.paused_clients
        return not (paused or self._is_suspect(sequence) or sequence.on_hold)

    def _may_start(self, sequence: Sequence) -> bool:
        request = sequence.request
        if sequence.on_hold or (self.held_back and (request.client_id, request.request_id) in self.held_back):
            return False
        return request.client_id not in self.paused_clients

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Lengthens the tables, preempting others if need be; False when it was this one's turn to give way."""
        if end <= len(sequence.held.tables[0]) * self.blocks.layout.page_size:
            return True  # most tokens of an answer go where the one before went
        self.blocks.trim(sequence.held, sequence.num_planned_tokens)
        while not self.blocks.extend(sequence.held, end):
            victim = self._last_idle(sequence) or self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _last_idle(self, sequence: Sequence) -> Sequence | None:
        """Of running ones that cannot go on: those of paused clients, and beams that wait for others of their group,
        if this is one of these or comes before them."""
        if not self._may_idle:
            return None
        for one in reversed(self.running):
            if one.request.client_id in self.paused_clients:
                return one
            if one.has_told and (one.group is sequence.group or one.key > sequence.key):
                return one
        return None

    @property
    def _may_idle(self) -> bool:
        return bool(self.paused_clients) or self._num_beams > 0

    def preempt(self, sequence: Sequence) -> None:
        """Takes the blocks of a running sequence; it waits and goes on later."""
        self.running.remove(sequence)
        drafting = sequence.drafting  # then it is not known how much it has
        swapped = None if drafting else self.tiers.swap_out(sequence.held, sequence.num_planned_tokens)
        self.blocks.release(sequence.held)
        self._removed.append(sequence.sequence_id)
        if swapped is None:
            sequence.start_over()
        else:
            sequence.set_aside(swapped)
        insort(self.waiting, sequence, key=_key)
        self.stats.preemptions += 1
        self.stats.preemptions_swapped += swapped is not None

    def _yield_to_urgent(self) -> None:
        """Preempts running sequences for the first waiting one, if it is of better priority and lacks a place."""
        urgent = next((s for s in self.waiting if self._may_start(s)), None)
        while urgent is not None and self.running:
            start = self._start_of(urgent)
            if start is None or self._has_place(urgent, start):
                return
            if self.running[-1].priority <= urgent.priority:
                return
            self.preempt(self.running[-1])

    def _plan_waiting(self, chunks: list[Chunk], budget: int, now: float) -> None:
        """Lets sequences in, in order, while budget, places and blocks for all their known tokens last.

        The blocks of the whole sequence are free when it starts, besides those that others in prefill still take,
        though only the first chunk's are taken.
        """
        for sequence in [s for s in self.waiting if self._may_start(s)]:
            if budget == 0 or (len(self.running) >= self.max_num_seqs and not self._may_idle):
                break
            start = self._start_of(sequence)
            while start and not self._has_place(sequence, start) and (idle := self._last_idle(sequence)):
                self.preempt(idle)
                start = self._start_of(sequence)
            if start is None:
                continue
            if not self._has_place(sequence, start):
                break
            self._begin(sequence, start, now)
            length = min(sequence.num_expected_tokens - start.num_tokens, budget, self.longest_chunk)
            self.blocks.extend(sequence.held, start.num_tokens + length)
            chunks.append(sequence.plan_chunk(length))
            budget -= length

    def _start_of(self, sequence: Sequence) -> Start | None:
        siblings = self._requests[sequence.request.client_id, sequence.request.request_id]
        return start_of(sequence, siblings, self.blocks, self.tiers)

    def _has_place(self, sequence: Sequence, start: Start) -> bool:
        if len(self.running) >= self.max_num_seqs:
            return False
        most = self.max_num_batched_tokens
        return self.blocks.can_start(sequence.num_expected_tokens, most, self._reserved(), start)

    def _begin(self, sequence: Sequence, start: Start, now: float) -> None:
        loaded = self.tiers.begin(sequence.held, start, sequence.keys, sequence.swapped)
        if sequence.swapped is None:
            sequence.begin(start.num_tokens)
        sequence.swapped = sequence.origin = None
        del self.waiting[bisect_left(self.waiting, sequence.key, key=_key)]
        insort(self.running, sequence, key=_key)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = now
            self.queue.started((sequence.request.client_id, sequence.request.request_id), now)
            self._count_start(sequence, start, loaded)
        self._end_fetch(sequence)

    def _end_fetch(self, sequence: Sequence) -> None:
        if sequence.fetch is not None:
            self.tiers.end_fetch(sequence.fetch)
            sequence.fetch = None

    def _count_start(self, sequence: Sequence, start: Start, loaded: set[int]) -> None:
        stats = self.stats
        stats.prompt_tokens += sequence.num_prompt_tokens
        if sequence.keys is not None and sequence.prompt_logprobs is None:
            stats.prefix_queries += sequence.num_tokens
            stats.prefix_hits += start.num_tokens
        sequence.num_cached_tokens = cached = min(start.num_tokens, sequence.num_prompt_tokens)
        for source, count in self.tiers.sources(cached, loaded, sequence.fetch, sequence.keys):
            stats.cached_by_source[source] = stats.cached_by_source.get(source, 0) + count

    def _reserved(self) -> list[int] | None:
        """Blocks that running sequences in the middle of prefill still take. Without a limit on chunks there are none:
        whoever is in prefill takes all the budget, so nobody starts before it has taken the rest."""
        if self.longest_chunk == self.max_num_batched_tokens:
            return None
        unfinished = [s for s in self.running if s.num_planned_tokens < s.num_expected_tokens - 1]
        owed = [self.blocks.owed(s.held, s.num_expected_tokens, self.max_num_batched_tokens) for s in unfinished]
        return [sum(group) for group in zip(*owed, strict=True)] or None

    def commit(self, plan: StepPlan, result: StepResult) -> Events:
        """Takes in what the runners computed. Sequences that ended meanwhile are passed over."""
        flight = self._in_flight.popleft()
        assert flight.plan is plan, "steps are committed in the order of their plans"
        self.tiers.done(plan.moves, result.move_seconds)
        self.tiers.speed.note_step(plan, result)
        events: Events = []
        sampled = iter(result.sampled)
        for chunk, (sequence, epoch) in zip(plan.chunks, flight.sequences, strict=True):
            tokens = next(sampled) if chunk.sample else None
            if sequence.sequence_id not in self._sequences:
                continue
            self._take(chunk, sequence, epoch, tokens, result.prompt_logprobs.get(chunk.sequence_id))
            if tokens and sequence.group is not None:
                assert tokens[0].logprobs is not None
                events += self._take_beams(sequence, sequence.group, tokens[0].logprobs)
            elif tokens:
                events.append(self._append(sequence, tokens))
            elif chunk.sample:
                count, fault = len(sequence.output_token_ids), result.faults.get(chunk.sequence_id)
                error = not_a_number(sequence.num_tokens) if tokens is None else no_token(count, fault)
                events += self._finish_all([sequence], "error", error)
            elif sequence.num_computed_tokens >= sequence.held.full_at:
                self._register(sequence)
        for sequence_id, drafts in result.drafts.items():
            if (drafted := self._sequences.get(sequence_id)) is not None and drafted.group is None:
                drafted.draft_token_ids = drafts
        num_tokens = plan.num_tokens
        self.stats.steps += 1
        self.stats.step_tokens += num_tokens
        self.stats.steps_by_tokens[bisect_left(ITERATION_BUCKETS, num_tokens)] += 1
        return events

    def _take(
        self, chunk: Chunk, sequence: Sequence, epoch: int, tokens: list[Sampled] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> None:  # fmt: skip
        """What a chunk computed is there, unless the sequence was preempted since; what it sampled counts anyway."""
        sequence.pending -= chunk.sample
        if sequence.epoch == epoch:
            sequence.computed(chunk, len(tokens or ()))
        if sequence.prompt_logprobs is not None and prompt_logprobs and (sequence.epoch == epoch or chunk.sample):
            sequence.prompt_logprobs += prompt_logprobs
        if chunk.num_drafts:
            self._count_drafts(chunk.num_drafts, len(tokens or ()) - 1)

    def _register(self, sequence: Sequence) -> None:
        """Lets the blocks be found that are computed, and whose tokens are known, for good."""
        if sequence.keys is not None and sequence.swapped is None:
            final = min(sequence.num_computed_tokens, sequence.num_tokens)
            self.blocks.register(sequence.held, sequence.keys, final)

    def _count_drafts(self, drafted: int, accepted: int) -> None:
        stats = self.stats
        stats.drafts += 1
        stats.draft_tokens += drafted
        stats.accepted_tokens += max(0, accepted)
        stats.accepted_by_position += [0] * (drafted - len(stats.accepted_by_position))
        for position in range(accepted):
            stats.accepted_by_position[position] += 1

    # -- a step that failed --------------------------------------------------------------------------------------------

    def fail(self, plan: StepPlan, error: OctavoError, sequence_id: int | None = None) -> Events:
        """The step was not computed: ends the sequence at fault, or all in the plan when nobody is to blame."""
        self._abandon(plan)
        ids = [c.sequence_id for c in plan.chunks] if sequence_id is None else [sequence_id]
        at_fault = [s for i in ids if (s := self._sequences.get(i)) is not None]
        events = self._finish_all(at_fault, "error", error)
        return events + self.end_suspect(error) if sequence_id is None else events

    def set_aside_newest(self, plan: StepPlan) -> bool:
        """The step was not computed: the next ones leave out its newest request, until `end_suspect`.

        False, and nothing done, when the plan holds only one request or one is set aside already.
        """
        there = [s for c in plan.chunks if (s := self._sequences.get(c.sequence_id)) is not None]
        names = {(s.request.client_id, s.request.request_id) for s in there}
        if self._suspect is not None or len(names) < 2:
            return False
        self._abandon(plan)
        newest = max(there, key=lambda s: s.sequence_id)
        self._suspect = (newest.request.client_id, newest.request.request_id)
        return True

    def end_suspect(self, error: OctavoError) -> Events:
        """Ends the request that was set aside, if there is one."""
        name, self._suspect = self._suspect, None
        return [] if name is None else self._finish_all(self._requests.get(name, ()), "error", error)

    def _is_suspect(self, sequence: Sequence) -> bool:
        if self._suspect is None:
            return False
        return (sequence.request.client_id, sequence.request.request_id) == self._suspect

    def _abandon(self, ran: StepPlan) -> None:
        """Takes back all plans under way. Of `ran` the moves were done; later ones did not reach the runners."""
        flights, self._in_flight = list(self._in_flight), deque()
        self._removed = [i for flight in flights for i in flight.plan.removed] + self._removed
        self._moves[:0] = [m for flight in flights if flight.plan is not ran for m in flight.plan.moves]
        self.tiers.done(ran.moves, 0.0)
        for sequence in {s: None for flight in flights for s, _ in flight.sequences}:
            if sequence.sequence_id not in self._sequences:
                continue
            sequence.back_to_computed()
            if sequence.swapped is not None:
                self.tiers.drop(sequence.swapped)
                sequence.start_over()
            if sequence.held.tables[0] and self.blocks.trimmed_too_far(sequence.held, sequence.num_computed_tokens):
                self.preempt(sequence)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _append(self, sequence: Sequence, sampled: list[Sampled]) -> tuple[str, TokenEvent]:
        """Adds tokens up to the one that ends the sequence, if one does."""
        first = len(sequence.output_token_ids) == sequence.num_carried_tokens
        if first and sequence.choice == 0:
            self._note_timing(sequence)
        event = TokenEvent(sequence.request.request_id, sequence.choice)
        event.cached_tokens = sequence.num_cached_tokens if first else 0
        reason: str | None = None
        for one in sampled:
            sequence.output_token_ids.append(one.token_id)
            event.token_ids.append(one.token_id)
            if one.logprobs is not None:
                event.logprobs = [*(event.logprobs or ()), one.logprobs]
            reason, event.stop_reason = self._why_done(sequence)
            if reason is not None:
                break
        self.stats.generation_tokens += len(event.token_ids)
        if sequence.num_computed_tokens >= sequence.held.full_at:
            self._register(sequence)
        if sequence.prompt_logprobs is not None:
            event.prompt_logprobs = [None, *sequence.prompt_logprobs]
            sequence.prompt_logprobs = None
        if reason is not None:
            self._remove(sequence)
            event.finish_reason = reason
        return sequence.request.client_id, event

    def _note_timing(self, sequence: Sequence) -> None:
        if sequence.first_scheduled_time is not None:
            name = (sequence.request.client_id, sequence.request.request_id)
            self._timings[name] = (sequence.queued_time, sequence.first_scheduled_time)

    def _take_beams(self, sequence: Sequence, group: BeamGroup, best: TokenLogprobs) -> Events:
        """Once all beams of the request have told what may follow: lets the best go on, or gives the answer."""
        if sequence.num_computed_tokens >= sequence.held.full_at:
            self._register(sequence)
        if not group.tell(sequence, best):
            return []
        born, dropped = group.advance(self._next_id, self.blocks.new_tables)
        for child in born:
            self._enter(child)
        for member in dropped:
            self._remove(member)
        if group.members:
            return []
        events = group.answer()
        self.stats.generation_tokens += sum(len(event.token_ids) for event in events)
        self._note_timing(sequence)
        return [(group.request.client_id, event) for event in events]

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
        del place[bisect_left(place, sequence.key, key=_key)]
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
        if self.adapters:
            self.stats.adapters_running, self.stats.adapters_waiting = map(adapter_names, (self.running, self.waiting))
        self.tiers.fill_in(self.stats)
        return self.stats

    def check_integrity(self) -> None:
        """Raises AssertionError when the state contradicts itself. Cost: all blocks and sequences."""
        everyone = list(self._sequences.values())
        assert sorted(self.running + self.waiting, key=_key) == sorted(everyone, key=_key), "lost or doubled sequence"
        for place in (self.running, self.waiting):
            assert place == sorted(place, key=_key), "order lost"
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


def _key(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.key
