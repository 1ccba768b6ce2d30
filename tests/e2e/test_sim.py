"""The whole engine on the device that computes nothing: real scheduler, batches and processes, made-up tokens."""

from __future__ import annotations

import random

from octavo import LLM, SamplingParams
from tests.real_models import path_of


def test_answers_do_not_depend_on_what_runs_beside():
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 40000) for _ in range(rng.randint(1, 300))]} for _ in range(40)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 40), ignore_eos=True, temperature=rng.choice([0.0, 0.8]), seed=i,
            repetition_penalty=rng.choice([1.0, 1.1]), logprobs=rng.choice([None, 2]),
        ) for i in range(40)
    ]  # fmt: skip
    with LLM(str(path_of("smollm2")), device="sim:h100", max_num_batched_tokens=512, max_num_seqs=16) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        alone = [llm.generate([p], [s], use_tqdm=False)[0] for p, s in zip(prompts, params, strict=True)][:8]
    assert all(len(a.outputs[0].token_ids) == s.max_tokens for a, s in zip(together, params, strict=True))
    for one, other in zip(alone, together, strict=False):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids, f"seed {seed}"
        assert one.outputs[0].logprobs == other.outputs[0].logprobs, f"seed {seed}"
    assert len({tuple(a.outputs[0].token_ids) for a in together}) == len(together)
