"""What changes the bits of an answer changes the fingerprint, and nothing else does."""

from __future__ import annotations

import random
import shutil

import pytest
import torch

from octavo.engine.fingerprint import fingerprint, numerics, weights_digest
from octavo.engine.worker import Prepare, Worker
from octavo.models.checkpoint import open_checkpoint
from tests.engine.tiny import config_for, write_llama
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/fingerprint")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"), SEED)


def of(folder, page_size=16, **asked):
    worker = Worker(config_for(folder, threads=1, block_size=page_size, **asked), 0, "")
    worker.prepare(Prepare(page_size, (4,), 64))
    return worker.fingerprint(page_size)


def test_it_follows_the_weights_and_not_their_place(folder, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert of(folder) == of(moved)
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    place = RNG.randrange(len(content) - 4096, len(content))
    content[place] ^= 1
    weights.write_bytes(content)
    assert of(folder) != of(moved), f"byte {place} changed, OCTAVO_SEED={SEED}"


def test_it_follows_precision_device_and_page_size(folder):
    found = [
        of(folder), of(folder, dtype="bfloat16"), of(folder, device="cpu"), of(folder, page_size=32, device="cpu"),
        of(folder, page_size=32),
    ]  # fmt: skip
    assert len(set(found)) == len(found)
    assert all(len(name) == 32 and int(name, 16) for name in found)


def test_the_number_of_threads_counts_only_without_the_kernels(folder):
    digest, device = (
        weights_digest(open_checkpoint(folder)),
        Worker(config_for(folder, device="cpu", block_size=16), 0, "").device,
    )
    facts = numerics(digest, device, torch.bfloat16, "auto", 16, 1)
    assert "threads" not in facts
    assert facts["kernels"] == device.kernels
    assert fingerprint(facts) == fingerprint(dict(reversed(facts.items()))), "order does not matter"
