"""Real models against answers computed elsewhere, through the whole engine.

Teacher-forced: prompt and right continuation are given as one prompt, so that every step sees the right prefix; the
logprobs of that prompt say what the model would have chosen. Decoding step by step is checked as far as the margins
make the continuation certain. Beside the golden files (tests/golden/README.md), fresh prompts are answered by
`transformers` in float32 on the same weights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.matrix import FULL, SEED, sample
from tests.real_models import LARGER, path_of

GOLDEN = Path(__file__).parent.parent / "golden"
PRECISIONS = {
    # name: (device, dtype, smallest margin at which our argmax must be the right token)
    "reference-fp32": ("reference", "float32", 0.01),
    "kernels-bf16": ("cpu", "bfloat16", 0.3),
}
MODELS = ("smollm2", LARGER) if FULL else ("smollm2",)  # the larger one takes 6 GB in float32
FRESH_PROMPTS = 24 if FULL else 8  # a few unlucky texts must not decide the mean
FRESH_TOKENS = 32
OPENINGS = (
    "The {} of the {} was", "Dear {},\n\nThank you for the {}.", "import {}\n\ndef {}(", "{}和{}的区别是",
    "Q: What is {}?\nA:", "1. {}\n2. {}\n3.", "# {}\n\n## {}\n\n", "{{\"{}\": [\"{}\",", "Le {} et la {}",
    "<p>{}</p><p>{}",
)  # fmt: skip
WORDS = ("river", "moon", "7", "theorem", "budget", "cat", "numpy", "上海", "bread", "1984", "🍜", "entropy", "königin")

Answer = dict[str, Any]
"""prompt_token_ids, prompt_logprobs (of fresh prompts also of what follows), greedy_token_ids, margins; and an id"""


@pytest.fixture(scope="module", params=[(m, p) for m in MODELS for p in PRECISIONS], ids="-".join)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, LLM]]:
    model, precision = request.param
    device, dtype, _ = PRECISIONS[precision]
    with LLM(model=model, device=device, dtype=dtype, max_model_len=2048) as llm:
        yield model, precision, llm


def golden_answers(model: str) -> list[Answer]:
    golden: list[Answer] = json.loads((GOLDEN / f"{model}.json").read_text())
    return golden


@pytest.fixture(scope="module")
def fresh_answers() -> list[Answer]:
    """What transformers says to prompts nobody has seen, on SmolLM2's dequantized weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = path_of("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    rng = random.Random(SEED)
    answers = []
    for number in range(FRESH_PROMPTS):
        text = rng.choice(OPENINGS).format(*rng.sample(WORDS, 2))
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        length = ids.shape[1]
        with torch.inference_mode():
            ids = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=FRESH_TOKENS,
                max_new_tokens=FRESH_TOKENS, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            scores = model(ids).logits[0, :-1].float().log_softmax(-1)
        best = scores[length - 1 :].topk(2).values
        answers.append({
            "id": f"fresh-{number} ({text!r}, OCTAVO_SEED={SEED})", "prompt_token_ids": ids[0, :length].tolist(),
            "prompt_logprobs": scores.gather(1, ids[0, 1:, None])[:, 0].tolist(),
            "greedy_token_ids": ids[0, length:].tolist(), "margins": (best[:, 0] - best[:, 1]).tolist(),
        })  # fmt: skip
    return answers


def check_teacher_forced(llm: LLM, precision: str, answers: list[Answer]) -> None:
    needed = PRECISIONS[precision][2]
    prompts = [{"prompt_token_ids": a["prompt_token_ids"] + a["greedy_token_ids"]} for a in answers]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    differences: list[float] = []
    for answer, output in zip(answers, llm.generate(prompts, params, use_tqdm=False), strict=True):
        scored = output.prompt_logprobs
        assert scored is not None
        assert scored[0] is None
        prompt, right = answer["prompt_token_ids"], answer["greedy_token_ids"]
        for i, expected in enumerate(answer["prompt_logprobs"], start=1):
            differences.append(abs(scored[i][(prompt + right)[i]].logprob - expected))
        for step, (token, margin) in enumerate(zip(right, answer["margins"], strict=True)):
            rank = scored[len(prompt) + step][token].rank
            assert rank == 1 or margin < needed, f"{answer['id']}: rank {rank} at step {step}, margin {margin}"
    if precision == "reference-fp32":
        assert max(differences) <= 2e-3
    else:
        assert sum(differences) / len(differences) < 0.05


def check_decoded(llm: LLM, precision: str, answers: list[Answer]) -> int:
    """Returns the number of steps that were certain enough to compare."""
    needed = PRECISIONS[precision][2]
    prompts = [{"prompt_token_ids": a["prompt_token_ids"]} for a in answers]
    params = SamplingParams(temperature=0, max_tokens=len(answers[0]["greedy_token_ids"]), ignore_eos=True)
    certain = 0
    for answer, output in zip(answers, llm.generate(prompts, params, use_tqdm=False), strict=True):
        right, margins = answer["greedy_token_ids"], answer["margins"]
        steps = next((i for i, margin in enumerate(margins) if margin < needed), len(margins))
        assert list(output.outputs[0].token_ids[:steps]) == right[:steps], answer["id"]
        certain += steps
    return certain


@pytest.mark.timeout(1200)
def test_golden_answers_teacher_forced(engine: tuple[str, str, LLM]) -> None:
    model, precision, llm = engine
    check_teacher_forced(llm, precision, golden_answers(model))


@pytest.mark.timeout(1200)
def test_golden_answers_decoded_step_by_step(engine: tuple[str, str, LLM]) -> None:
    model, precision, llm = engine
    answers = golden_answers(model)
    if precision == "reference-fp32":
        answers = sample(answers, 6)  # one sequence after the other in plain torch: slow
    assert check_decoded(llm, precision, answers) > 20, "the margins should leave something to compare"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", [("smollm2", p) for p in PRECISIONS], ids="-".join, indirect=True)
def test_fresh_prompts(engine: tuple[str, str, LLM], fresh_answers: list[Answer]) -> None:
    _, precision, llm = engine
    check_teacher_forced(llm, precision, fresh_answers)
    check_decoded(llm, precision, fresh_answers)
