"""When an answer is complete by its tokens, and why there may be none to go on with. No torch."""

from __future__ import annotations

from collections.abc import Collection

from octavo.engine.types import RepetitionDetectionParams, SamplingParams
from octavo.errors import InvalidRequest, OctavoError

REPETITION_DETECTED = "repetition_detected"
"""the stop reason, in vLLM's words"""


def why_done(
    sampling: SamplingParams, output: list[int], eos_token_ids: Collection[int], room: int
) -> tuple[str | None, int | str | None]:
    """(finish reason, stop reason) after the last token of `output`; Nones to go on. `room` is what the context leaves.

    vLLM's order: end of sequence, stop ids, length, repetition; nothing but a full context before `min_tokens`.
    """
    if not output:
        return None, None
    if len(output) >= sampling.min_tokens:
        last = output[-1]
        if last in eos_token_ids and not sampling.ignore_eos:
            return "stop", None
        if last in sampling.stop_token_ids:
            return "stop", last
    if room <= 0 or (sampling.max_tokens is not None and len(output) >= sampling.max_tokens):
        return "length", None
    detection = sampling.repetition_detection
    if detection is not None and len(output) >= sampling.min_tokens and repeats(output, detection):
        return "repetition", REPETITION_DETECTED
    return None, None


def repeats(output: list[int], detection: RepetitionDetectionParams) -> bool:
    """Whether `output` ends with a pattern of a size that counts, `min_count` times.

    A pattern of size p stands so often at the end when the last p * min_count tokens are equal to those p before them.
    """
    longest = min(detection.max_pattern_size, len(output) // max(1, detection.min_count))
    last, before = output[-1], output[-1 - longest : -1]
    if last not in before:
        return False
    for size in range(max(1, detection.min_pattern_size), longest + 1):
        if before[-size] == last:
            end = output[-size * detection.min_count :]
            if end[size:] == end[:-size]:
                return True
    return False


def not_a_number(num_tokens: int) -> OctavoError:
    return OctavoError(
        f"the model's output after {num_tokens} tokens is NaN or infinite",
        fix="check the model's files, or compute in another --dtype",
    )


def no_token(num_output: int, fault: str | None) -> InvalidRequest:
    """`fault` is the grammar's, if it is to blame."""
    if fault is not None:
        return InvalidRequest(
            f"the grammar cannot be followed: {fault}", fix="make the grammar simpler", param="structured_outputs"
        )
    return InvalidRequest(
        f"after {num_output} tokens of the answer every next token is excluded",
        limit="1 that allowed_token_ids, bad_words, stop tokens before min_tokens, logit_bias and the grammar leave",
        fix="exclude less",
    )
