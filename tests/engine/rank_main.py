"""One rank of a group, as a program: loads models, runs prompts, writes the logits.

    python -m tests.engine.rank_main RANK SIZE DIRECTORY

`job.json` in the directory holds the names of models there, each with its prompts, and the seed of the schedules.
"""

import json
import random
import sys
from pathlib import Path

import torch

from octavo.dist.group import Group
from octavo.models.checkpoint import open_checkpoint
from octavo.models.loader import load_model
from tests.paged_decoder import paged_logits, reference_device


def main(rank: int, size: int, directory: Path) -> None:
    job = json.loads((directory / "job.json").read_text())
    group = Group.join(rank, size, "gloo", f"file://{directory}/rendezvous")
    shared = group.broadcast(torch.tensor([job["seed"] if rank == 0 else 0]))
    device = reference_device()
    for name, prompts in job["models"].items():
        decoder = load_model(open_checkpoint(directory / name), device, torch.float32, group)
        logits = paged_logits(decoder, device, prompts, random.Random(int(shared)))
        torch.save({"logits": logits, "weights_bytes": decoder.weights_bytes}, directory / f"{name}-rank{rank}.pt")
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
