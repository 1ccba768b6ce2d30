"""How much KV cache there is, which dtype is computed in, and several ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from octavo.backends.kv import FullAttention, KVGroup, SlidingWindow
from octavo.backends.reference import ReferenceDevice
from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
from octavo.engine.sizing import choose_page_size, kv_budget, size_kv
from octavo.engine.worker import choose_device
from octavo.errors import BadModelFile, NotEnoughMemory, UsageError
from tests.engine.tiny import LocalEngine, config_for, request, tokens_of

BLOCK_BYTES = 2 * 3 * 8 * 16 * 4
"""of 2 layers, 16 tokens, 3 heads of 8 channels, keys and values in float32, over 2 (a layer)"""


def config(**fields):
    base = {
        "model": "m", "path": "m", "device": "reference", "dtype": "auto", "max_model_len": 160, "vocab_size": 10,
        "eos_token_ids": (), "block_size": None, "gpu_memory_utilization": None, "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": None, "max_num_seqs": 4, "max_num_batched_tokens": 32, "tensor_parallel_size": 1,
        "threads": None, "seed": 0,
    }  # fmt: skip
    return EngineConfig(**{**base, **fields})


FULL = KVGroup(FullAttention(3, 8), (0, 1))
WINDOW = KVGroup(SlidingWindow(3, 8, 32), (2, 3))


class Memory(ReferenceDevice):
    def __init__(self, total, free):
        super().__init__()
        self.facts = total, free

    def memory(self):
        return self.facts


def sizing(settings, groups=(FULL,), total=1 << 40, free=1 << 39):
    device = Memory(total, free)
    return size_kv(settings, device, groups, torch.float32, *kv_budget(settings, device, 1))


def test_never_more_blocks_than_can_be_used():
    size = sizing(config())
    assert size.layout.num_blocks == (4 * 10,)
    assert size.kv_cache_bytes == 40 * 2 * BLOCK_BYTES
    assert sizing(config(num_gpu_blocks_override=77)).layout.num_blocks == (77,)


def test_bytes_make_blocks():
    assert sizing(config(kv_cache_memory_bytes=25 * 2 * BLOCK_BYTES + 1)).layout.num_blocks == (25,)
    half = sizing(config(), free=2 * 30 * 2 * BLOCK_BYTES)
    assert half.layout.num_blocks == (30,)
    most = sizing(config(gpu_memory_utilization=0.5), total=100 * 2 * BLOCK_BYTES, free=80 * 2 * BLOCK_BYTES)
    assert most.layout.num_blocks == (30,)


def test_windows_take_what_they_reach():
    size = sizing(config(), (FULL, WINDOW))
    assert size.layout.num_blocks == (40, 4 * 5), "32 + 32 - 2 positions touch at most 5 blocks"


def test_too_little_memory_cuts_the_context_or_says_why():
    few = {"kv_cache_memory_bytes": 5 * 2 * BLOCK_BYTES}
    size = sizing(config(**few))
    assert (size.max_model_len, size.layout.num_blocks) == (80, (5,))
    assert "from 160 to 80 tokens" in size.warning
    assert sizing(config()).warning is None
    with pytest.raises(NotEnoughMemory, match=r"--max-model-len 160 needs 10 KV blocks.*limit: 5 blocks.*fix: lower"):
        sizing(config(max_model_len_asked=True, **few))
    with pytest.raises(NotEnoughMemory, match="not one KV block of 16 tokens"):
        sizing(config(kv_cache_memory_bytes=BLOCK_BYTES))
    with pytest.raises(NotEnoughMemory, match="override 99 needs"):
        sizing(config(num_gpu_blocks_override=99), free=BLOCK_BYTES)


def test_page_sizes_are_checked():
    device = SimpleNamespace(name="x", default_page_size=128, page_multiple=16)
    assert choose_page_size(config(), device) == 128
    assert choose_page_size(config(block_size=32), device) == 32
    with pytest.raises(UsageError, match=r"--block-size 24.*multiple of 16"):
        choose_page_size(config(block_size=24), device)


def test_dtypes(caplog):
    assert choose_device(config(), 0)[1] is torch.float32
    device, dtype = choose_device(config(device="cpu", dtype="float32"), 0)
    assert (device.name, dtype) == ("reference", torch.float32)
    device, dtype = choose_device(config(device="cpu", dtype="float16"), 0)
    assert (device.name, dtype) == ("cpu", torch.bfloat16)
    assert "computes in bfloat16 instead" in caplog.text
    device, dtype = choose_device(config(device="cpu"), 0)
    assert dtype is (torch.float32 if device.kernels == "reference" else torch.bfloat16)


def test_block_size_of_the_old_flag_suits_the_cpu():
    assert choose_page_size(config(block_size=32), choose_device(config(device="cpu"), 0)[0]) == 32


async def collect(client, one):
    return [event async for batch in client.generate(one) for event in batch]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_ranks_give_the_answers_of_one(llama, rng, ranks):
    asked = [
        request(str(i), [rng.randrange(3, 160) for _ in range(rng.randint(1, 90))], temperature=0.7, seed=i,
                logprobs=2, prompt_logprobs=1)
        for i in range(4)
    ]  # fmt: skip
    expected = LocalEngine(llama).run(*asked)
    client = await EngineClient.start(config_for(llama, tensor_parallel_size=ranks, threads=1))
    children = psutil.Process(client.facts.pid).children()
    try:
        assert len(children) == ranks - 1
        answers = await asyncio.gather(*(collect(client, one) for one in asked))
        for one, events in zip(asked, answers, strict=True):
            assert tokens_of(events) == tokens_of(expected[one.request_id][0])
            assert len(events[0].prompt_logprobs) == len(one.prompt_token_ids)
        assert client.facts.num_blocks == client.stats.blocks_total
        if ranks == 2:
            task = asyncio.create_task(collect(client, request("long", [5], count=200)))
            await asyncio.sleep(0.2)
            os.kill(children[0].pid, signal.SIGKILL)
            assert "rank 1 ended (killed by SIGKILL)" in str(await asyncio.wait_for(client.died(), 5))
            assert (await task)[-1].finish_reason == "error"
    finally:
        await client.shutdown()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


async def test_a_missing_torch_is_a_typed_error(llama, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UsageError, match=r"No module named torch.*install"):
        await EngineClient.start(config_for(llama))


async def test_a_model_that_cannot_be_loaded_is_a_typed_error(llama, tmp_path):
    with pytest.raises(NotEnoughMemory, match="not one KV block"):
        await EngineClient.start(config_for(llama, kv_cache_memory_bytes=10))
    broken = config_for(llama, tensor_parallel_size=2)
    moved = EngineConfig(**{**broken.to_dict(), "path": str(tmp_path / "gone")})
    with pytest.raises(BadModelFile, match="gone"):
        await EngineClient.start(moved)


@pytest.mark.parametrize(("settings", "error", "says"), [
    ({"device": "cpu", "block_size": 7}, UsageError, "--block-size 7.*multiple of 16"),
    ({"kv_cache_memory_bytes": 10}, NotEnoughMemory, "not one KV block"),
    ({"kv_cache_memory_bytes": 1 << 13, "max_model_len": 200}, NotEnoughMemory, "--max-model-len 200 needs"),
    ({"num_gpu_blocks_override": 1 << 30}, NotEnoughMemory, "override 1073741824 needs"),
    ({"tensor_parallel_size": 7}, UsageError, "--tensor-parallel-size 7 does not divide"),
    ({"kv_cache_memory_bytes": None, "gpu_memory_utilization": 1e-9}, NotEnoughMemory, "not one KV block"),
])  # fmt: skip
async def test_settings_that_cannot_work_are_refused_once_and_before_weights_are_read(
    llama, capfd, settings, error, says
):
    seen = []
    with pytest.raises(error, match=says):
        await EngineClient.start(config_for(llama, **settings), seen.append)
    assert seen == []
    assert capfd.readouterr().err == ""
