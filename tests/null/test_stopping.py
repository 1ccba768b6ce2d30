"""When an answer is complete, against a slow reading of what vLLM says."""

from __future__ import annotations

import random

from octavo.engine.stopping import repeats, why_done
from octavo.engine.types import RepetitionDetectionParams, SamplingParams
from tests.matrix import SEED
from tests.null.test_scheduler import VOCAB, build, finish, request, tokens_of


def slow_repeats(output, detection):
    for size in range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1):
        wanted = size * detection.min_count
        if wanted <= len(output) and output[-wanted:] == output[-size:] * detection.min_count:
            return True
    return False


def some_detection(rng):
    longest = rng.randint(1, 9)
    return RepetitionDetectionParams(
        max_pattern_size=longest, min_pattern_size=rng.randint(0, longest), min_count=rng.randint(2, 5)
    )


def test_repetition_is_found_as_a_slow_search_finds_it():
    rng = random.Random(f"{SEED}/repetition")
    found = 0
    for _ in range(3000):
        pattern = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        output = [rng.randrange(3) for _ in range(rng.randint(1, 12))] + pattern * rng.randint(0, 5)
        detection = some_detection(rng)
        expected = slow_repeats(output, detection)
        assert repeats(output, detection) == expected, f"OCTAVO_SEED={SEED}, {output}, {detection}"
        found += expected
    assert 300 < found < 2700


def test_nothing_but_length_ends_before_min_tokens():
    rng = random.Random(f"{SEED}/min_tokens")
    for _ in range(2000):
        sampling = SamplingParams(
            min_tokens=rng.randint(0, 8), max_tokens=rng.randint(8, 12), stop_token_ids=[1, 2],
            ignore_eos=rng.random() < 0.3, repetition_detection=some_detection(rng),
        )  # fmt: skip
        output = [rng.randrange(4) for _ in range(rng.randint(1, 12))]
        room = rng.choice([0, 1, 50])
        reason, detail = why_done(sampling, output, {0}, room)
        free = len(output) >= sampling.min_tokens
        expected: tuple[str | None, int | str | None] = (None, None)
        if free and output[-1] == 0 and not sampling.ignore_eos:
            expected = "stop", None
        elif free and output[-1] in (1, 2):
            expected = "stop", output[-1]
        elif room == 0 or len(output) >= sampling.max_tokens:
            expected = "length", None
        elif free and slow_repeats(output, sampling.repetition_detection):
            expected = "repetition", "repetition_detected"
        assert (reason, detail) == expected, f"OCTAVO_SEED={SEED}, {sampling}, {output}, {room}"


def test_a_repetition_ends_a_sequence():
    """The null model repeats itself only by chance, so the smallest pattern is asked for: a token twice."""
    rng = random.Random(f"{SEED}/scheduler")
    detection = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    ended = 0
    for _ in range(60):
        scheduler, runner = build(blocks=(40,), length=160, seqs=2, budget=16)
        scheduler.add(request(prompt=[rng.randrange(VOCAB)], max_tokens=100, repetition_detection=detection), 0.0)
        ((_, events),) = finish(scheduler, runner).items()
        tokens = tokens_of(events)
        repeated = [i for i in range(1, len(tokens)) if tokens[i] == tokens[i - 1]]
        last = events[-1]
        if repeated:
            assert (last.finish_reason, last.stop_reason) == ("repetition", "repetition_detected")
            assert repeated == [len(tokens) - 1], "it ends at once"
            ended += 1
        else:
            assert last.finish_reason == "length"
    assert ended > 5, f"OCTAVO_SEED={SEED}"
