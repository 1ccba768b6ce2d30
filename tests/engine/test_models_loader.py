"""Loading: progress, bytes held, and weights that do not fit."""

import random

import pytest
import torch

from octavo.backends.reference import ReferenceDevice
from octavo.errors import BadModelFile, NotEnoughMemory
from octavo.models.checkpoint import open_checkpoint
from octavo.models.loader import load_model
from octavo.quant.gguf_blocks import read_into
from tests.gguf_fixtures import write_gguf
from tests.matrix import SEED
from tests.models_fixtures import random_model, save
from tests.paged_decoder import reference_device


class SmallDevice(ReferenceDevice):
    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 16


def test_weights_that_do_not_fit(tmp_path):
    save(random_model("llama", SEED), tmp_path, torch.float32, sharded=False)
    with pytest.raises(
        NotEnoughMemory, match=r"the weights need 0\.00 GiB in float32; limit: 0\.00 GiB are free; fix:"
    ):
        load_model(open_checkpoint(tmp_path), SmallDevice(), torch.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_progress_and_bytes(tmp_path, tied):
    model = save(random_model("qwen2", SEED, tie_word_embeddings=tied), tmp_path, torch.float32, sharded=True)
    told: list[tuple[str, int, int]] = []
    checkpoint = open_checkpoint(tmp_path)
    decoder = load_model(checkpoint, reference_device(), torch.bfloat16, progress=lambda *news: told.append(news))
    done = [d for _, d, _ in told]
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert done == sorted(done)
    assert done[-1] == total
    assert {t for _, _, t in told} == {total}
    assert decoder.weights_bytes == 2 * sum(p.numel() for p in model.parameters())


def test_rope_reaches_as_far_as_asked(tmp_path):
    save(random_model("llama", SEED), tmp_path, torch.float32, sharded=False)
    decoder = load_model(open_checkpoint(tmp_path), reference_device(), torch.float32, max_positions=10)
    assert decoder.layers[0].attention.rope_table.shape == (10, 12)


def test_bytes_of_quantized_files_are_counted_as_stored(tmp_path):
    write_gguf(tmp_path / "a.gguf", "llama", "Q4_0", SEED)
    checkpoint = open_checkpoint(tmp_path)
    told: list[int] = []
    load_model(checkpoint, reference_device(), torch.float32, progress=lambda stage, done, total: told.append(total))
    assert told[0] == sum(info.nbytes for info in checkpoint.tensors.values())


def test_type_that_no_reader_knows():
    with pytest.raises(BadModelFile, match="weights of type IQ2_XXS; limit: F32, F16, BF16, Q4_0, "):
        read_into(torch.empty(256), torch.zeros(66, dtype=torch.uint8).numpy(), "IQ2_XXS")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_weights_that_are_no_numbers_are_named(tmp_path, value):
    """The last overflows in bfloat16."""
    rng = random.Random(f"{SEED}/{value}")
    model = random_model("qwen2", SEED)
    name, parameter = rng.choice(list(model.named_parameters()))
    place = rng.randrange(parameter.numel())
    parameter.data.view(-1)[place] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(BadModelFile, match=f"tensor '{name}' holds NaN, infinity, or more than bfloat16 can"):
        load_model(open_checkpoint(tmp_path), reference_device(), torch.bfloat16)
    if value == 3.4e38:
        load_model(open_checkpoint(tmp_path), reference_device(), torch.float32)


def test_numbers_whose_sum_overflows_are_no_fault(tmp_path):
    model = random_model("llama", SEED)
    model.model.embed_tokens.weight.data[:] = 3e38
    model.save_pretrained(tmp_path)
    load_model(open_checkpoint(tmp_path), reference_device(), torch.float32)
