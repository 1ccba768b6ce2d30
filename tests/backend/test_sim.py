"""The device without arithmetic: its time, its memory, and that its answers depend on nothing but the request."""

from __future__ import annotations

import json
import random

import pytest
import torch

from octavo.backends.base import AttentionMeta, ForwardBatch, open_device
from octavo.backends.kv import FullAttention
from octavo.backends.names import check_device, reads_weights
from octavo.backends.sim.device import SimDevice
from octavo.backends.sim.profiles import DEFAULT, PROFILES
from octavo.clock import VirtualClock
from octavo.errors import BadModelFile, NotEnoughMemory, UsageError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.simulated import SimulatedDecoder

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 128001,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def virtual_device(profile=DEFAULT) -> SimDevice:
    device = open_device(f"sim:{profile}")
    device.clock = VirtualClock()
    return device


def decode_batch(context: int, sequences: int) -> ForwardBatch:
    meta = AttentionMeta(
        torch.arange(sequences + 1, dtype=torch.int32), torch.full((sequences,), context, dtype=torch.int32),
        torch.zeros(sequences, 1, dtype=torch.int32), torch.zeros(sequences, dtype=torch.int64), 128,
    )  # fmt: skip
    return ForwardBatch(torch.arange(sequences), torch.full((sequences,), context - 1), (meta,))


def test_weights_are_needed_by_all_other_devices(folder):
    assert open_checkpoint(folder, weights=False).spec.num_layers == 32
    with pytest.raises(BadModelFile, match="no safetensors"):
        open_checkpoint(folder)
    assert not reads_weights("sim")
    assert not reads_weights("sim:h100")
    assert reads_weights("auto")


@pytest.mark.parametrize("profile", PROFILES)
def test_decoding_one_sequence_takes_the_time_to_read_weights_and_cache(folder, profile):
    device = virtual_device(profile)
    model = SimulatedDecoder(open_checkpoint(folder, weights=False), device, torch.bfloat16, 1)
    assert model.weights_bytes == pytest.approx(8.03e9 * 2, rel=0.001), "Llama 3 8B has 8.03 billion parameters"
    model.forward(decode_batch(4096, 1), [])
    model.logits(torch.zeros(1, 1, dtype=torch.int64))
    device.synchronize()
    embedding, cache = 128256 * 4096 * 2, 4096 * 32 * 2 * 8 * 128 * 2
    wanted = (model.weights_bytes - embedding + cache) / PROFILES[profile].bandwidth
    assert device.clock.monotonic() == pytest.approx(wanted, rel=1e-6)


def test_prefill_is_bound_by_arithmetic(folder):
    device = virtual_device()
    model = SimulatedDecoder(open_checkpoint(folder, weights=False), device, torch.bfloat16, 1)
    tokens = 8192
    meta = AttentionMeta(
        torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64), 128,
    )  # fmt: skip
    model.forward(ForwardBatch(torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), (meta,)), [])
    device.synchronize()
    layers = model.weights_bytes / 2 - 2 * 128256 * 4096
    attention = 4 * tokens * (tokens + 1) / 2 * 32 * 128 * 32
    wanted = (2 * tokens * layers + attention) / PROFILES[DEFAULT].flops
    assert device.clock.monotonic() == pytest.approx(wanted, rel=1e-4)


def test_ranks_share_the_weights_and_what_does_not_fit_is_refused(folder):
    config = {**LLAMA_8B, "num_hidden_layers": 320}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(folder, weights=False)
    with pytest.raises(NotEnoughMemory, match=r"weights need 141\.7 GB"):
        SimulatedDecoder(checkpoint, virtual_device(), torch.bfloat16, 1)
    device = virtual_device()
    quarter = SimulatedDecoder(checkpoint, device, torch.bfloat16, 4)
    total, free = device.memory()
    assert total - free == quarter.weights_bytes
    assert quarter.kv_groups[0].spec == FullAttention(2, 128)


def test_an_unknown_machine_is_refused_with_those_known():
    for name in ("sim:", "sim:abacus", "cpu:0"):
        with pytest.raises(UsageError, match=name):
            check_device(name)
    check_device("sim:a100")


def test_a_token_depends_on_token_position_seed_and_choice_only(folder):
    seed = random.randrange(1 << 30)
    device = virtual_device()
    model = SimulatedDecoder(open_checkpoint(folder, weights=False), device, torch.bfloat16, 1)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 1000, (64,), generator=generator)
    positions = torch.randint(0, 1000, (64,), generator=generator)
    meta = decode_batch(8, 64).attention

    def hidden(rows):
        return model.logits(model.forward(ForwardBatch(tokens[rows], positions[rows], meta), []))

    together = device.ops.logprobs(hidden(slice(0, 64)), tokens, 3)
    chosen = hidden(slice(0, 64))[:, 0]
    for row in random.Random(seed).sample(range(64), 8):
        assert hidden([row])[0, 0] == chosen[row], f"seed {seed}"
    assert len(set(chosen.tolist())) > 60
    assert together[3].max() < LLAMA_8B["vocab_size"]
