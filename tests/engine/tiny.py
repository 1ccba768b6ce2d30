"""Tiny random models written by transformers, and an engine without processes around them."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

import torch

from octavo.config import EngineArgs, EngineConfig, Speculation, resolve
from octavo.engine.disk_tier import DiskTier
from octavo.engine.grammar import Compiler
from octavo.engine.pages import KVLayout
from octavo.engine.runner import Runner
from octavo.engine.scheduler import Scheduler
from octavo.engine.types import MAX_CHOICES, Request, SamplingParams, TokenEvent
from octavo.engine.worker import choose_device, choose_kv_format
from octavo.models.checkpoint import open_checkpoint
from octavo.models.loader import load_model

VOCAB = 160
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.4,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_llama(folder: Path, seed: int, **sizes: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).save_pretrained(folder)
    return folder


def write_mistral(folder: Path, seed: int, window: int) -> Path:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(seed)
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).save_pretrained(folder)
    return folder


@lru_cache(maxsize=4)
def transformers_model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def true_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V] of transformers."""
    return transformers_model(folder)(torch.tensor([tokens])).logits[0].float()


def config_for(folder: Path, **asked) -> EngineConfig:
    args = {"device": "reference", "kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 16, "block_size": 4, **asked}
    return resolve(EngineArgs(model="tiny", **args), open_checkpoint(folder).facts())


class LocalEngine:
    """Scheduler and runner in this process."""

    def __init__(
        self, folder: Path, *, blocks: int = 200, page_size: int = 4, budget: int = 64, seqs: int = 16,
        device_name: str = "reference", kv_cache_dtype: str = "auto", speculation: Speculation | None = None,
        compiler: Compiler | None = None, host_slots: int = 0, disk: DiskTier | None = None, **settings: bool | int,
    ) -> None:  # fmt: skip
        device, dtype = choose_device(config_for(folder, device=device_name, threads=1), rank=0)
        checkpoint = open_checkpoint(folder)
        model = load_model(checkpoint, device, dtype)
        layout = KVLayout(page_size, tuple(g.spec for g in model.kv_groups), (blocks,) * len(model.kv_groups))
        spec, quantized = checkpoint.spec, choose_kv_format(kv_cache_dtype, device, dtype)
        limits = {"max_num_seqs": seqs, "max_model_len": spec.context_len, "vocab_size": spec.vocab_size}
        limits["eos_token_ids"] = checkpoint.eos_token_ids
        draft = None
        if speculation is not None and speculation.model is not None:
            draft = load_model(open_checkpoint(Path(speculation.model)), device, dtype)
        self.runner = Runner(
            model, device, layout, dtype, quantized=quantized, speculation=speculation, draft_model=draft,
            compiler=compiler, host_slots=(host_slots,) * len(layout.specs), **limits,
        )  # fmt: skip
        host = self.runner.store if host_slots else None
        self.scheduler = Scheduler(layout, max_num_batched_tokens=budget, host=host, disk=disk, **limits, **settings)

    def run(self, *requests: Request) -> dict[str, list[list[TokenEvent]]]:
        """Request id to the events of each choice."""
        answers: defaultdict[str, list[list[TokenEvent]]] = defaultdict(lambda: [[] for _ in range(MAX_CHOICES)])
        for request in requests:
            self.scheduler.add(request, 0.0)
        while self.scheduler.has_work:
            plan = self.scheduler.plan(0.0)
            if not plan.chunks:  # all wait for the disk
                time.sleep(0.001)
                continue
            for _, event in self.scheduler.commit(plan, self.runner.run(plan)):
                answers[event.request_id][event.choice].append(event)
            self.scheduler.check_integrity()
        return {name: [events for events in choices if events] for name, choices in answers.items()}


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def request(name: str, prompt: list[int], count: int = 12, output: list[list[int]] | None = None, **fields) -> Request:
    sampling = SamplingParams(**{"max_tokens": count, "ignore_eos": True, "temperature": 0.0, **fields})
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, output_token_ids=output or [])
