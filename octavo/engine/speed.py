"""What the engine has seen of its own speed, and what that says of moving blocks or computing them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.plan import StepPlan, StepResult

LONG = 16
"""tokens of a chunk that is no decoding step, with drafts or without"""
FORGET = 0.9
"""share of its weight that an observation keeps when the next one comes"""


class Rate:
    """Seconds for each unit, over the last ten or so observations, the larger ones counting more."""

    def __init__(self) -> None:
        self._units = self._seconds = 0.0

    def note(self, units: float, seconds: float) -> None:
        self._units = FORGET * self._units + units
        self._seconds = FORGET * self._seconds + seconds

    @property
    def seconds_each(self) -> float | None:
        """None before anything was seen."""
        return self._seconds / self._units if self._units > 0 else None


@dataclass(frozen=True)
class Choice:
    """Whether to move, with the numbers that say so, in seconds; None: not known yet."""

    move: bool
    move_s: float | None
    compute_s: float | None

    def __str__(self) -> str:
        verb = "move" if self.move else "compute"
        return f"{verb}: moving would take {_ms(self.move_s)}, computing {_ms(self.compute_s)}"


class SpeedModel:
    """`prefill` in tokens, `host` and `disk` in bytes."""

    def __init__(self) -> None:
        self.prefill, self.host, self.disk = Rate(), Rate(), Rate()

    def note_step(self, plan: StepPlan, result: StepResult) -> None:
        """A step counts if it is mostly prefill: half of its tokens or more are in long chunks."""
        seconds = result.seconds - result.move_seconds
        lengths = [len(chunk.token_ids) for chunk in plan.chunks]
        long = sum(length for length in lengths if length >= LONG)
        if seconds > 0 and long and 2 * long >= sum(lengths):
            self.prefill.note(sum(lengths), seconds)

    def swap(self, num_tokens: int, num_bytes: int) -> Choice:
        """For a preempted sequence: to the host and back, or to be computed again; what the prefix cache will keep in
        either case is in neither number."""
        return self._choose(num_tokens, self.host, 2 * num_bytes)

    def read(self, num_tokens: int, num_bytes: int) -> Choice:
        """For blocks that lie on disk."""
        return self._choose(num_tokens, self.disk, num_bytes)

    def _choose(self, num_tokens: int, rate: Rate, num_bytes: int) -> Choice:
        move, compute = rate.seconds_each, self.prefill.seconds_each
        move_s = None if move is None else move * num_bytes
        compute_s = None if compute is None else compute * num_tokens
        return Choice(move_s is None or compute_s is None or move_s < compute_s, move_s, compute_s)


def _ms(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{1000 * seconds:.2f} ms"
