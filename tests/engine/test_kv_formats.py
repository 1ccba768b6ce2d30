"""--kv-cache-dtype: names, what a block costs, the same answers however computed, and how near they are to bf16."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from octavo.backends.base import open_device
from octavo.backends.kv import FullAttention, KVGroup
from octavo.engine.client import EngineClient
from octavo.engine.sizing import kv_budget, size_kv
from octavo.engine.worker import choose_kv_format
from octavo.errors import UsageError
from octavo.text.tokenizer import load_tokenizer
from tests.engine.tiny import LocalEngine, config_for, request, tokens_of
from tests.matrix import SEED, sample
from tests.real_models import path_of

QUANTIZED = ("int8", "fp8", "fp8_e5m2", "fp8_per_token_head")


def test_names():
    cpu, plain = open_device("cpu", threads=1), open_device("reference", threads=1)
    assert choose_kv_format("auto", plain, torch.float32) is None
    assert choose_kv_format("half", plain, torch.float16) is None
    assert choose_kv_format("bfloat16", cpu, torch.bfloat16) is None
    assert choose_kv_format("int8", cpu, torch.bfloat16) == choose_kv_format(
        "int8_per_token_head", plain, torch.float32
    )
    assert choose_kv_format("fp8", cpu, torch.bfloat16).name == "fp8_e4m3"
    with pytest.raises(
        UsageError, match=r"--kv-cache-dtype float16 .*computes in bfloat16; limit: auto, bfloat16, int8"
    ):
        choose_kv_format("float16", cpu, torch.bfloat16)
    with pytest.raises(UsageError, match="--kv-cache-dtype nvfp4"):
        choose_kv_format("nvfp4", plain, torch.float32)


@pytest.mark.parametrize(("name", "bytes_a_token"), [("auto", 2 * 3 * 64 * 2), ("fp8", 2 * 3 * 64),
                                                     ("int8", 2 * 3 * (64 + 4))])  # fmt: skip
def test_scales_count_as_kv_cache(llama, name, bytes_a_token):
    device = open_device("cpu", threads=1)
    config = config_for(llama, device="cpu", block_size=16, kv_cache_memory_bytes=20 * 16 * bytes_a_token)
    form = choose_kv_format(name, device, torch.bfloat16)
    group = KVGroup(FullAttention(3, 64), (0,))
    sizing = size_kv(config, device, (group,), torch.bfloat16, *kv_budget(config, device, 1), form)
    assert sizing.layout.num_blocks == (20,)


async def test_the_engine_says_what_it_keeps(llama):
    client = await EngineClient.start(config_for(llama, threads=1, kv_cache_dtype="fp8"))
    try:
        assert client.facts.kv_cache_dtype == "fp8_e4m3"
        events = [event async for batch in client.generate(request("a", [5, 6, 7])) for event in batch]
        assert len(tokens_of(events)) == 12
    finally:
        await client.shutdown(drain=False)
    with pytest.raises(UsageError, match="--kv-cache-dtype int4"):
        await EngineClient.start(config_for(llama, threads=1, kv_cache_dtype="int4"))


def real_engine(name: str, **limits) -> LocalEngine:
    return LocalEngine(
        path_of("smollm2"),
        device_name="cpu",
        page_size=16,
        **{"blocks": 64, "budget": 512, "kv_cache_dtype": name, **limits},
    )


@cache
def prompt() -> tuple[int, ...]:
    """300 tokens from somewhere in our documents."""
    root = Path(__file__).parents[2]
    text = "\n".join((root / "docs" / name).read_text(encoding="utf-8") for name in ("architecture.md", "http-api.md"))
    tokens = load_tokenizer(path_of("smollm2")).encode(text)
    start = random.Random(SEED).randrange(len(tokens) - 300)
    return tuple(tokens[start : start + 300])


@cache
def scored(name: str):
    """Logprob of each prompt token, and the best token at its place."""
    events = real_engine(name).run(request("a", list(prompt()), count=1, prompt_logprobs=1))["a"][0]
    found = [p for p in events[0].prompt_logprobs if p is not None]
    return torch.tensor([p.logprobs[0] for p in found]), torch.tensor([p.token_ids[1] for p in found])


@pytest.mark.parametrize(
    ("name", "most_moved", "least_agreed"),
    [("int8", 0.10, 0.94), ("fp8", 0.20, 0.88), ("fp8_e5m2", 0.40, 0.78), ("fp8_per_token_head", 0.20, 0.88)],
)
def test_near_to_bf16(name, most_moved, least_agreed):
    """Mean change of a token's logprob, and how often the best token is the same. Measured over 700 tokens of English:
    0.043 and 98.6 % for int8; 0.099, 94.1 %; 0.185, 89.0 %; 0.086, 95.4 %; bounds leave room for other text."""
    (base, best), (moved, now) = scored("auto"), scored(name)
    assert (base - moved).abs().mean() <= most_moved, f"OCTAVO_SEED={SEED}"
    assert (best == now).float().mean() >= least_agreed, f"OCTAVO_SEED={SEED}"


@pytest.mark.parametrize("name", sample(QUANTIZED, 2))
def test_chunks_batches_and_recomputing_change_no_bit(name):
    """Alone in one chunk, against a batch in small chunks that is preempted."""
    rng = random.Random(SEED)
    asked = [
        request(str(i), list(prompt()[i : i + rng.randint(20, 90)]), count=24, temperature=rng.choice([0, 0.8]), seed=i,
                logprobs=1)
        for i in range(6)
    ]  # fmt: skip
    single = real_engine(name)
    together = real_engine(name, budget=rng.choice([7, 16, 40]), blocks=24).run(*asked)
    for one in asked:
        alone, batched = single.run(one)[one.request_id][0], together[one.request_id][0]
        assert tokens_of(alone) == tokens_of(batched), f"OCTAVO_SEED={SEED}"
        assert [e.logprobs for e in alone] == [e.logprobs for e in batched], f"OCTAVO_SEED={SEED}"
