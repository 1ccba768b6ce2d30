"""Two ranks over gloo give the logits of one."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.errors import UsageError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.loader import load_model
from octavo.models.spec import check_divisible
from tests.gguf_fixtures import write_gguf
from tests.matrix import SEED
from tests.models_fixtures import random_model, save
from tests.paged_decoder import paged_logits, random_prompts, reference_device

ROOT = Path(__file__).parents[2]


def write_biased(path: Path, seed: int) -> Path:
    """All kinds of bias, tied embeddings, a vocabulary of odd size."""
    settings = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    save(random_model("llama", seed, **settings), path, torch.float32, sharded=True)
    return path


def write_windowed(path: Path, seed: int) -> Path:
    window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    save(random_model("qwen2", seed, **window), path, torch.bfloat16, sharded=False)
    return path


def write_blocks(path: Path, seed: int) -> Path:
    write_gguf(path / "model.gguf", "llama", "Q4_K", seed)
    return path / "model.gguf"


def test_two_ranks_equal_one(tmp_path):
    rng = random.Random(SEED)
    models: dict[str, list[list[int]]] = {}
    for write in (write_biased, write_windowed, write_blocks):
        path = tmp_path / write.__name__
        path.mkdir()
        write(path, rng.randrange(1 << 30))
        models[path.name] = random_prompts(rng, 64)
    job = {"models": models, "seed": rng.randrange(1 << 30)}
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "tests.engine.rank_main"]
    ranks = [subprocess.Popen([*command, str(r), "2", str(tmp_path)], cwd=ROOT) for r in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    device = reference_device()
    for name, prompts in models.items():
        alone = load_model(open_checkpoint(tmp_path / name), device, torch.float32)
        expected = paged_logits(alone, device, prompts, random.Random(job["seed"]))
        results = [torch.load(tmp_path / f"{name}-rank{r}.pt") for r in range(2)]
        for first, second, single in zip(results[0]["logits"], results[1]["logits"], expected, strict=True):
            assert first.shape == single.shape
            assert torch.equal(first, second)
            torch.testing.assert_close(first, single, atol=2e-4, rtol=1e-4, msg=lambda m: f"OCTAVO_SEED={SEED}: {m}")
        assert max(r["weights_bytes"] for r in results) < 0.6 * alone.weights_bytes


def test_uneven_split_is_refused(tmp_path):
    spec = open_checkpoint(write_biased(tmp_path, SEED)).spec
    with pytest.raises(UsageError, match=r"size 3 does not divide the model's 4 attention heads, 2 key.*80 int") as bad:
        check_divisible(spec, 3)
    assert bad.value.param == "tensor_parallel_size"
    assert "use 1 or 2" in str(bad.value)
    check_divisible(spec, 2)
