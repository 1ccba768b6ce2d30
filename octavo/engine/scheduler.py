"""Decides what each step computes. No torch; neither `plan` nor `commit` reads the device.

There is no prefill or decode: a step gives each running sequence, under one token budget, what it lacks, and then lets
waiting ones in. When blocks run out, the running sequence that is last in order gives its blocks back and waits to be
computed again, with the tokens that it has generated. So the first in order always advances, and nothing is dropped.

A plan may be made while the step before it runs (see `sequence`); steps are committed in the order of their plans.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from octavo.engine.beams import BeamGroup
from octavo.engine.pages import Start
from octavo.engine.plan import Chunk, Sampled, StepPlan, StepResult
from octavo.engine.roster import Events, InFlight, Roster, key_of
from octavo.engine.sequence import Sequence
from octavo.engine.starts import start_of
from octavo.engine.stopping import no_token, not_a_number
from octavo.engine.types import TokenEvent, TokenLogprobs
from octavo.errors import OctavoError
from octavo.wire.metric_names import ITERATION_BUCKETS


class Scheduler(Roster):
    """`add` and `abort` at any time; `plan`, run the plan, `commit` (or `fail`); the next plan may come before it."""

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
        self._in_flight.append(InFlight(plan, [(s, s.epoch) for s in sequences]))
        return plan

    def last_plan(self) -> StepPlan:
        """When nothing is under way any more: saves what the next start may want, and computes nothing."""
        self.tiers.keep_for_next_start()
        plan = StepPlan([], [], [], list(self._moves))
        self._moves.clear()
        return plan

    def _plan_running(self, chunks: list[Chunk]) -> tuple[int, bool]:
        """Returns the budget that is left, and whether blocks sufficed without preemption.

        Guesses get at most half of the budget, and leave one token of it for each sequence that is still to come.
        """
        budget, preemptions = self.max_num_batched_tokens, self.stats.preemptions
        to_come, for_drafts = len(self.running), budget // 2
        for sequence in list(self.running):
            to_come -= 1
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
                most = min(room - 1, budget - length - to_come, for_drafts)
                drafts = self._num_drafts(sequence, sequence.num_planned_tokens + length, most)
            if self._make_room(sequence, sequence.num_planned_tokens + length + drafts):
                chunks.append(sequence.plan_chunk(length, drafts))
                budget -= length + drafts
                for_drafts -= drafts
        return budget, preemptions == self.stats.preemptions

    def _num_drafts(self, sequence: Sequence, end: int, most: int) -> int:
        """How many of its guesses to try after `end`, for which blocks are taken; none if that would preempt others."""
        count = min(len(sequence.draft_token_ids), most)
        if count <= 0:
            return 0
        self.blocks.trim(sequence.held, sequence.num_planned_tokens)
        return count if self.blocks.extend(sequence.held, end + count) else 0

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
        self._register(sequence)
        drafting = sequence.drafting  # then it is not known how much it has
        swapped = None if drafting else self.tiers.swap_out(sequence.held, sequence.num_planned_tokens)
        self.blocks.release(sequence.held)
        self._removed.append(sequence.sequence_id)
        if swapped is None:
            sequence.start_over()
        else:
            sequence.set_aside(swapped)
        insort(self.waiting, sequence, key=key_of)
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
        del self.waiting[bisect_left(self.waiting, sequence.key, key=key_of)]
        insort(self.running, sequence, key=key_of)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = now
            self.queue.started((sequence.request.client_id, sequence.request.request_id), now)
            self._count_start(sequence, start, loaded)
        self._end_fetch(sequence)

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
        if first or reason is not None or sequence.num_computed_tokens >= sequence.held.full_at:
            self._register(sequence)
        if sequence.prompt_logprobs is not None:
            event.prompt_logprobs = [None, *sequence.prompt_logprobs]
            sequence.prompt_logprobs = None
        if reason is not None:
            self._remove(sequence)
            event.finish_reason = reason
        return sequence.request.client_id, event

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
