"""Beam search for callers of the Python API, in vLLM's names. The search itself is the engine's (`beams`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.engine.types import SamplingParams
from octavo.errors import InvalidRequest


@dataclass(frozen=True)
class BeamSearchParams:
    """`beam_width` answers are searched for and given; a higher `length_penalty` prefers longer ones."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """0 only: nothing is left to chance"""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling(self, max_logprobs: int) -> SamplingParams:
        """Raises InvalidRequest for a temperature."""
        if self.temperature != 0:
            raise InvalidRequest(
                f"temperature is {self.temperature}", limit="0 for beam search", fix="leave it out", param="temperature"
            )
        return SamplingParams(
            n=self.beam_width, use_beam_search=True, length_penalty=self.length_penalty, max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos, include_stop_str_in_output=self.include_stop_str_in_output, temperature=0.0,
            logprobs=min(2 * self.beam_width, max_logprobs),
        )  # fmt: skip


@dataclass
class BeamSearchSequence:
    """One answer. `tokens` and `text` begin with the prompt."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_output(output: RequestOutput, prompt: str, params: BeamSearchParams) -> BeamSearchOutput:
    return BeamSearchOutput([_sequence(output, choice, prompt, params) for choice in output.outputs])


def _sequence(
    output: RequestOutput, choice: CompletionOutput, prompt: str, params: BeamSearchParams
) -> BeamSearchSequence:
    """Without the token that ends it, unless that is asked for."""
    kept = len(choice.token_ids)
    if choice.finish_reason == "stop" and not params.include_stop_str_in_output:
        kept -= 1
    return BeamSearchSequence(
        [*output.prompt_token_ids, *choice.token_ids[:kept]], (choice.logprobs or [])[:kept],
        choice.cumulative_logprob or 0.0, prompt + choice.text, choice.finish_reason, choice.stop_reason,
    )  # fmt: skip
