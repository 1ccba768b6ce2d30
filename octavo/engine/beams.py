"""Beam search: which continuations of a prompt to go on with. It only decides; the scheduler computes and forks.

As in vLLM: from each beam the 2 * width likeliest tokens; of all these the `width` best are the next beams, but for
those that end, which are put aside; after `max_tokens` tokens, or when no beam is left, the best of all are the answer.
What is best: cumulative logprob / length ** length_penalty, where the length is that of prompt and output, without
the token that ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from octavo.engine.pages import BlockTables
from octavo.engine.sequence import Sequence
from octavo.engine.types import Request, SamplingParams, TokenEvent, TokenLogprobs
from octavo.errors import OctavoError, to_wire


@dataclass(frozen=True)
class Beam:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | None = None


class BeamSearch:
    """One request's search. `advance` with the logprobs after each live beam, until it gives none."""

    def __init__(self, num_prompt_tokens: int, sampling: SamplingParams, eos: Iterable[int], most_tokens: int) -> None:
        """`most_tokens`: how long an output may become."""
        self._num_prompt_tokens, self._sampling, self._most_tokens = num_prompt_tokens, sampling, most_tokens
        self._eos = frozenset() if sampling.ignore_eos else frozenset(eos)
        self.width = sampling.num_choices
        self._shown = sampling.logprobs
        self._ended: list[tuple[float, Beam]] = []

    def advance(self, told: list[tuple[Beam, TokenLogprobs]]) -> list[tuple[int, Beam]]:
        """(index into `told` of the beam that it continues, beam) of each beam to go on with, the best first."""
        going: list[tuple[float, int, int]] = []
        for index, (beam, best) in enumerate(told):
            length = self._num_prompt_tokens + len(beam.token_ids)
            for rank, token in enumerate(best.token_ids[1 : 2 * self.width + 1], 1):
                cumulative = beam.cumulative_logprob + best.logprobs[rank]
                if token in self._eos or token in self._sampling.stop_token_ids:
                    reason = None if token in self._eos else token
                    self._end(self._score(cumulative, length), _extended(beam, best, rank, self._shown, "stop", reason))
                else:
                    going.append((self._score(cumulative, length + 1), index, rank))
        going.sort(key=lambda one: one[0], reverse=True)
        full = bool(told) and len(told[0][0].token_ids) + 1 >= self._most_tokens
        beams = []
        for score, index, rank in going[: self.width]:
            beam = _extended(*told[index], rank, self._shown, "length" if full else None)
            if full:
                self._end(score, beam)
            else:
                beams.append((index, beam))
        return beams

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return float(cumulative_logprob / length**self._sampling.length_penalty)

    def _end(self, score: float, beam: Beam) -> None:
        """Keeps the best as far as they are asked for; of equals the earlier."""
        self._ended.append((score, beam))
        self._ended.sort(key=lambda one: one[0], reverse=True)
        del self._ended[self._sampling.n :]

    def answer(self) -> list[Beam]:
        """The best of those that ended, the best first: fewer than asked for where there are no more."""
        return [beam for _, beam in self._ended]


def _extended(
    beam: Beam, best: TokenLogprobs, rank: int, shown: int | None, finish_reason: str | None,
    stop_reason: int | None = None,
) -> Beam:  # fmt: skip
    """One token longer: by that which stands at `rank`, 1 the likeliest. `shown`: logprobs to keep of each token."""
    token, logprob = best.token_ids[rank], best.logprobs[rank]
    logprobs = beam.logprobs
    if shown is not None:
        top = slice(1, shown + 1)
        kept = TokenLogprobs([token, *best.token_ids[top]], [logprob, *best.logprobs[top]], rank)
        logprobs = [*logprobs, kept]
    return Beam([*beam.token_ids, token], logprobs, beam.cumulative_logprob + logprob, finish_reason, stop_reason)


class BeamGroup:
    """The live beams of one request, each a sequence. Those that have told what may follow wait for the others."""

    def __init__(self, request: Request, first: Sequence, eos: Iterable[int], max_model_len: int) -> None:
        asked, prompt = request.sampling, len(request.prompt_token_ids)
        most = max_model_len - prompt
        self.request, self._first = request, first
        self.search = BeamSearch(prompt, asked, eos, most if asked.max_tokens is None else min(most, asked.max_tokens))
        self.sampling = SamplingParams(
            use_beam_search=True,
            temperature=0.0,
            max_tokens=asked.max_tokens,
            logprobs=max(2 * self.search.width, asked.logprobs or 0),
        )
        """what the runners are told"""
        self.members: dict[Sequence, Beam] = {first: Beam()}
        self.told: dict[Sequence, TokenLogprobs] = {}
        self.open = set(range(asked.n))
        """choices whose end is not told yet"""

    def tell(self, member: Sequence, best: TokenLogprobs) -> bool:
        """Notes what may follow one; true once all have told."""
        self.told[member] = best
        return len(self.told) == len(self.members)

    def advance(self, next_id: int, new_tables: Callable[[], BlockTables]) -> tuple[list[Sequence], list[Sequence]]:
        """(new members, which come from those that go on; members to remove), once all have told.

        At the end of the search all are to be removed. New ones are numbered from `next_id`.
        """
        parents = list(self.members)
        going = self.search.advance([(self.members[one], self.told[one]) for one in parents])
        self.told.clear()
        born: list[Sequence] = []
        continued: set[Sequence] = set()
        for index, beam in going:
            parent = parents[index]
            if parent in continued:
                child = self._fork(parent, beam, next_id + len(born), new_tables())
                self.members[child] = beam
                born.append(child)
            else:
                continued.add(parent)
                self.members[parent] = beam
        for parent in continued:
            parent.output_token_ids.append(self.members[parent].token_ids[-1])
        return born, [parent for parent in parents if parent not in continued]

    def _fork(self, parent: Sequence, beam: Beam, sequence_id: int, tables: BlockTables) -> Sequence:
        return Sequence(
            sequence_id, parent.request, 0, parent.seed, tables, parent.queued_time, parent.priority,
            list(beam.token_ids), group=self, adapter=parent.adapter, origin=parent, arrival=parent.arrival,
            first_scheduled_time=parent.first_scheduled_time,
        )  # fmt: skip

    def leave(self, member: Sequence) -> None:
        self.members.pop(member, None)
        self.told.pop(member, None)

    def end(
        self, reason: str, choices: Iterable[int] | None = None, error: OctavoError | None = None
    ) -> list[TokenEvent]:
        """The last events of open choices, all when None, which have no answer."""
        ending = sorted(self.open if choices is None else self.open.intersection(choices))
        self.open.difference_update(ending)
        wire = None if error is None else to_wire(error)
        return [TokenEvent(self.request.request_id, choice, finish_reason=reason, error=wire) for choice in ending]

    def answer(self) -> list[TokenEvent]:
        """The last events of the open choices, the best beam first."""
        events = []
        for choice, beam in enumerate(self.search.answer()):
            if choice in self.open:
                self.open.remove(choice)
                events.append(
                    TokenEvent(
                        self.request.request_id, choice, beam.token_ids,
                        beam.logprobs if self.request.sampling.logprobs is not None else None,
                        cached_tokens=self._first.num_cached_tokens if choice == 0 else 0,
                        finish_reason=beam.finish_reason, stop_reason=beam.stop_reason,
                    )
                )  # fmt: skip
        assert not self.open, "fewer beams ended than were asked for"
        return events
