"""Decides what each step computes. No torch; neither `plan` nor `commit` reads the device.

Every sequence is in exactly one place: `running` (may hold blocks) or `waiting` (holds none); both are kept in the
order (priority, arrival). There is no prefill or decode: a step gives each running sequence, under one token budget,
what it lacks, and then lets waiting ones in. When blocks run out, the running sequence that is last in order gives its
blocks back and waits to be computed again, with the tokens that it has generated. So the first in order always
advances, and nothing is dropped.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Any

from octavo.engine.messages import Stats
from octavo.engine.noise import DRAW_SEED, noise_key
from octavo.engine.pages import KVBlocks, KVLayout
from octavo.engine.plan import Chunk, Sampled, StepPlan, StepResult
from octavo.engine.sequence import Sequence
from octavo.engine.types import SEED_BITS, Request, TokenEvent
from octavo.errors import InvalidRequest, OctavoError, Overloaded, to_wire
from octavo.wire.metric_names import ITERATION_BUCKETS

MAX_WAITING = 16384
"""sequences waiting, beyond which new requests are refused"""

Events = list[tuple[str, TokenEvent]]
"""client id and event"""


class Scheduler:
    """`add` and `abort` at any time; then `plan`, run the plan, `commit` (or `fail`); again."""

    def __init__(
        self, layout: KVLayout, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
        vocab_size: int, eos_token_ids: Iterable[int], seed: int = 0,
    ) -> None:  # fmt: skip
        self.blocks = KVBlocks(layout)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.paused_clients: frozenset[str] = frozenset()
        """their sequences are not scheduled, and are the first to give up blocks; set by the core"""
        self.stats = Stats(blocks_total=self.blocks.num_blocks, steps_by_tokens=[0] * (len(ITERATION_BUCKETS) + 1))
        self._draw_seed = _seed_source(seed)
        self._next_id = 0
        self._sequences: dict[int, Sequence] = {}
        self._requests: dict[tuple[str, str], list[Sequence]] = {}
        self._removed: list[int] = []
        self._timings: dict[tuple[str, str], tuple[float, float]] = {}

    # -- admission and end ---------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Events:
        """Admits `request.sampling.n` sequences.

        Returns terminal events of choices that carry a complete answer already. Raises InvalidRequest, or Overloaded.
        """
        self._check(request)
        sampling = request.sampling
        seed = self._draw_seed() if sampling.seed is None else sampling.seed
        carried = request.output_token_ids or [[] for _ in range(sampling.n)]
        sequences = self._requests[request.client_id, request.request_id] = []
        for choice in range(sampling.n):
            sequence = Sequence(
                self._next_id, request, choice, seed, self.blocks.new_tables(), now, list(carried[choice]),
                prompt_logprobs=[] if sampling.prompt_logprobs is not None and choice == 0 else None,
            )  # fmt: skip
            self._next_id += 1
            self._sequences[sequence.sequence_id] = sequence
            sequences.append(sequence)
            insort(self.waiting, sequence, key=_key)
        done = [(s, *self._why_done(s)) for s in sequences]
        return [self._finish(s, reason, stop_reason) for s, reason, stop_reason in done if reason is not None]

    def _check(self, request: Request) -> None:
        sampling, prompt = request.sampling, request.prompt_token_ids
        sampling.verify(self.vocab_size, self.vocab_size)
        if (request.client_id, request.request_id) in self._requests:
            raise InvalidRequest(f"request id {request.request_id} is in use", fix="give each request its own id")
        if not prompt:
            raise InvalidRequest("the prompt is empty", limit="at least 1 token", fix="add text", param="prompt")
        carried = request.output_token_ids
        if carried and len(carried) != sampling.n:
            raise InvalidRequest(f"output_token_ids holds {len(carried)} choices", limit=f"n is {sampling.n}")
        for tokens in (prompt, *carried):
            if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
                raise InvalidRequest(
                    f"token id {min(tokens) if min(tokens) < 0 else max(tokens)} is outside the vocabulary",
                    limit=f"0 to {self.vocab_size - 1}", fix="use this model's tokenizer", param="prompt",
                )  # fmt: skip
        longest = len(prompt) + max((len(tokens) for tokens in carried), default=0)
        if len(prompt) >= self.max_model_len or longest > self.max_model_len:
            raise InvalidRequest(
                f"the prompt is {longest} tokens long, which leaves no room to answer",
                limit=f"context of {self.max_model_len} tokens", fix="shorten it", param="prompt",
            )  # fmt: skip
        final = min(len(prompt) + (sampling.max_tokens or self.max_model_len), self.max_model_len)
        if not self.blocks.can_ever_hold(final - 1, self.max_num_batched_tokens):
            raise InvalidRequest(
                f"{final} tokens (prompt and max_tokens) do not fit into the KV cache",
                limit=f"{self.blocks.num_blocks} blocks of {self.blocks.layout.page_size} tokens",
                fix="shorten the prompt or lower max_tokens", param="max_tokens",
            )  # fmt: skip
        if len(self.waiting) + sampling.n > MAX_WAITING:
            raise Overloaded(f"{len(self.waiting)} sequences are waiting", limit=str(MAX_WAITING), fix="try later")

    def abort(self, client_id: str, request_id: str, choices: Iterable[int] | None = None) -> Events:
        """Ends choices of a request (all when None). One that is unknown or over is none of our business."""
        wanted = None if choices is None else set(choices)
        sequences = self._requests.get((client_id, request_id), ())
        return [self._finish(s, "abort") for s in list(sequences) if wanted is None or s.choice in wanted]

    def drop_client(self, client_id: str) -> None:
        """Ends all that a departed client asked for; there is nobody to tell."""
        for sequence in [s for s in self._sequences.values() if s.request.client_id == client_id]:
            self._finish(sequence, "abort")

    def expire(self, now: float) -> Events:
        """Ends sequences whose deadline has passed."""
        limited = [s for s in self._sequences.values() if s.request.deadline is not None]
        return [self._finish(s, "abort") for s in limited if (s.request.deadline or now) <= now]

    def end_all(self, error: OctavoError | None = None) -> Events:
        """Ends everything: with error events, or as aborted."""
        reason = "abort" if error is None else "error"
        return [self._finish(s, reason, error=error) for s in list(self._sequences.values())]

    # -- a step --------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """What to compute next; without chunks when nothing can run. Takes blocks and may preempt."""
        chunks: list[Chunk] = []
        budget, enough_room = self._plan_running(chunks)
        if enough_room:
            self._plan_waiting(chunks, budget, now)
        added = [s for c in chunks if not (s := self._sequences[c.sequence_id]).known_to_runners]
        return StepPlan(list(self._removed), [s.introduction() for s in added], chunks)

    def _plan_running(self, chunks: list[Chunk]) -> tuple[int, bool]:
        """Returns the budget that is left, and whether blocks sufficed without preemption."""
        budget, preemptions = self.max_num_batched_tokens, self.stats.preemptions
        for sequence in list(self.running):
            if not sequence.held.tables[0]:
                continue  # preempted by one before it in this very step
            if sequence.request.client_id in self.paused_clients:
                continue
            length = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            if length == 0:
                break
            if self._make_room(sequence, sequence.num_computed_tokens + length):
                chunks.append(sequence.chunk(length))
                budget -= length
        return budget, preemptions == self.stats.preemptions

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Lengthens the tables, preempting others if need be; False when it was this one's turn to give way."""
        self.blocks.trim(sequence.held, sequence.num_computed_tokens)
        while not self.blocks.extend(sequence.held, end):
            victim = self._last_paused() or self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _last_paused(self) -> Sequence | None:
        return next((s for s in reversed(self.running) if s.request.client_id in self.paused_clients), None)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence.held)
        sequence.start_over()
        self._removed.append(sequence.sequence_id)
        insort(self.waiting, sequence, key=_key)
        self.stats.preemptions += 1

    def _plan_waiting(self, chunks: list[Chunk], budget: int, now: float) -> None:
        """Lets sequences in, in order, while budget, places and blocks for all their known tokens last.

        The blocks of the whole sequence are free when it starts, though only the first chunk's are taken: whoever
        is still in prefill takes all the budget, so nobody else starts before it has taken the rest.
        """
        for sequence in [s for s in self.waiting if s.request.client_id not in self.paused_clients]:
            if budget == 0:
                break
            while not self._has_place(sequence) and (paused := self._last_paused()):
                self._preempt(paused)
            if not self._has_place(sequence):
                break
            length = min(sequence.num_tokens, budget)
            self.blocks.extend(sequence.held, length)
            del self.waiting[bisect_left(self.waiting, sequence.key, key=_key)]
            insort(self.running, sequence, key=_key)
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
                self.stats.prompt_tokens += sequence.num_prompt_tokens
            chunks.append(sequence.chunk(length))
            budget -= length

    def _has_place(self, sequence: Sequence) -> bool:
        fits = self.blocks.can_start(sequence.num_tokens, self.max_num_batched_tokens)
        return fits and len(self.running) < self.max_num_seqs

    def commit(self, plan: StepPlan, result: StepResult) -> Events:
        """Takes in what the runners computed. Sequences that ended meanwhile are passed over."""
        del self._removed[: len(plan.removed)]
        events: Events = []
        sampled = iter(result.sampled)
        for chunk in plan.chunks:
            tokens = next(sampled) if chunk.sample else None
            sequence = self._sequences.get(chunk.sequence_id)
            if sequence is None:
                continue
            sequence.computed(chunk)
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs += result.prompt_logprobs.get(chunk.sequence_id, [])
            if tokens:
                events.append(self._append(sequence, tokens[0]))
            elif chunk.sample:
                error = _not_a_number(sequence) if tokens is None else _no_token(sequence)
                events.append(self._finish(sequence, "error", error=error))
        self.stats.steps += 1
        self.stats.step_tokens += plan.num_tokens
        self.stats.steps_by_tokens[bisect_left(ITERATION_BUCKETS, plan.num_tokens)] += 1
        return events

    def fail(self, plan: StepPlan, error: OctavoError, sequence_id: int | None = None) -> Events:
        """The step was not computed: ends the sequence at fault, or all in the plan when nobody is to blame."""
        ids = [c.sequence_id for c in plan.chunks] if sequence_id is None else [sequence_id]
        at_fault = [s for i in ids if (s := self._sequences.get(i)) is not None]
        return [self._finish(s, "error", error=error) for s in at_fault]

    def _append(self, sequence: Sequence, sampled: Sampled) -> tuple[str, TokenEvent]:
        first = sequence.choice == 0 and len(sequence.output_token_ids) == sequence.num_carried_tokens
        if first and sequence.first_scheduled_time is not None:
            name = (sequence.request.client_id, sequence.request.request_id)
            self._timings[name] = (sequence.queued_time, sequence.first_scheduled_time)
        sequence.output_token_ids.append(sampled.token_id)
        self.stats.generation_tokens += 1
        reason, stop_reason = self._why_done(sequence)
        event = TokenEvent(
            sequence.request.request_id, sequence.choice, [sampled.token_id],
            None if sampled.logprobs is None else [sampled.logprobs],
            stop_reason=stop_reason,
        )  # fmt: skip
        if sequence.prompt_logprobs is not None:
            event.prompt_logprobs = [None, *sequence.prompt_logprobs]
            sequence.prompt_logprobs = None
        if reason is not None:
            self._remove(sequence)
            event.finish_reason = reason
        return sequence.request.client_id, event

    def _why_done(self, sequence: Sequence) -> tuple[str | None, int | None]:
        """(finish reason, stop reason) after the last output token; vLLM's order: end of sequence, stop ids, length."""
        sampling, output = sequence.request.sampling, sequence.output_token_ids
        if not output:
            return None, None
        if output[-1] in self.eos_token_ids and not sampling.ignore_eos:
            return "stop", None
        if output[-1] in sampling.stop_token_ids:
            return "stop", output[-1]
        full = sampling.max_tokens is not None and len(output) >= sampling.max_tokens
        return ("length" if full or sequence.num_tokens >= self.max_model_len else None), None

    def _finish(
        self, sequence: Sequence, reason: str, stop_reason: int | None = None, error: OctavoError | None = None
    ) -> tuple[str, TokenEvent]:
        self._remove(sequence)
        wire: dict[str, Any] | None = None if error is None else to_wire(error)
        event = TokenEvent(
            sequence.request.request_id, sequence.choice, finish_reason=reason, stop_reason=stop_reason, error=wire
        )
        return sequence.request.client_id, event

    def _remove(self, sequence: Sequence) -> None:
        """The one place where a sequence leaves; its caller makes the terminal event."""
        place = self.running if sequence.held.tables[0] else self.waiting
        del place[bisect_left(place, sequence.key, key=_key)]
        self.blocks.release(sequence.held)
        self._removed.append(sequence.sequence_id)
        del self._sequences[sequence.sequence_id]
        name = (sequence.request.client_id, sequence.request.request_id)
        self._requests[name].remove(sequence)
        if not self._requests[name]:
            del self._requests[name]

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def take_timings(self) -> dict[tuple[str, str], tuple[float, float]]:
        """(queued, first scheduled) in seconds since the epoch, by (client id, request id), of each request whose
        choice 0 has had its first token since the last call."""
        taken, self._timings = self._timings, {}
        return taken

    def snapshot(self) -> Stats:
        self.stats.running, self.stats.waiting = len(self.running), len(self.waiting)
        self.stats.blocks_used = self.blocks.num_used
        return self.stats

    def check_integrity(self) -> None:
        """Raises AssertionError when the state contradicts itself. Cost: all blocks and sequences."""
        everyone = list(self._sequences.values())
        assert sorted(self.running + self.waiting, key=_key) == sorted(everyone, key=_key), "lost or doubled sequence"
        for place in (self.running, self.waiting):
            assert place == sorted(place, key=_key), "order lost"
        assert all(s.held.tables[0] for s in self.running), "a running sequence holds no blocks"
        assert not any(any(s.held.tables) or s.num_computed_tokens for s in self.waiting), "a waiting one holds blocks"
        assert len(self.running) <= self.max_num_seqs, "too many running"
        assert all(0 <= s.num_computed_tokens < s.num_tokens <= self.max_model_len for s in everyone), "token counts"
        assert sum(map(len, self._requests.values())) == len(everyone), "requests and sequences differ"
        self.blocks.check_integrity([s.held for s in everyone])


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key


def _not_a_number(sequence: Sequence) -> OctavoError:
    return OctavoError(
        f"the model's output after {sequence.num_tokens} tokens is NaN or infinite",
        fix="check the model's files, or compute in another --dtype",
    )


def _no_token(sequence: Sequence) -> OctavoError:
    return InvalidRequest(
        f"after {len(sequence.output_token_ids)} tokens of the answer every next token is excluded",
        limit="at least 1 that allowed_token_ids, bad_words, stop tokens before min_tokens and logit_bias leave",
        fix="exclude less",
    )


def _seed_source(seed: int) -> Callable[[], int]:
    """Seeds of requests that bring none: from the system, or, for an engine with a seed, a fixed series."""
    counter = iter(range(1 << SEED_BITS))

    def draw() -> int:
        if seed == 0:
            return int.from_bytes(os.urandom(8), "little") >> (64 - SEED_BITS)
        return noise_key(seed, 0, next(counter), DRAW_SEED) >> (64 - SEED_BITS)

    return draw
