"""One rank's part of a step: plan to tensors, forward, and on rank 0 the choice of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.backends.base import Device, ForwardBatch, KVCache, allocating
from octavo.backends.kv import KVFormat, KVGroup
from octavo.engine.batch import BatchBuilder, Indices, Rows
from octavo.engine.logprobs import token_logprobs
from octavo.engine.pages import KVLayout
from octavo.engine.plan import Chunk, Move, NewSequence, SequenceFault, StepPlan, StepResult
from octavo.engine.sampler import Sampler
from octavo.engine.types import TokenLogprobs

LOGITS_AT_ONCE = 1 << 24
"""elements of a slice of prompt logits (64 MiB of float32), which a long prompt with a large vocabulary would exceed"""


class Model(Protocol):
    """What the runner needs of `models.decoder.Decoder`."""

    kv_groups: tuple[KVGroup, ...]

    def forward(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Runner:
    """Every rank runs the same plans in the same order; only rank 0 has results."""

    def __init__(
        self, model: Model, device: Device, layout: KVLayout, dtype: torch.dtype, *, max_num_seqs: int,
        max_model_len: int, vocab_size: int, rank: int = 0, eos_token_ids: Sequence[int] = (),
        quantized: KVFormat | None = None,
    ) -> None:  # fmt: skip
        self._model, self._device, self._rank, self._vocab_size = model, device, rank, vocab_size
        self._rows = Rows(max_num_seqs)
        self._builder = BatchBuilder(layout, max_num_seqs, max_model_len, device)
        self._sampler = Sampler(max_num_seqs, vocab_size, device, eos_token_ids)
        self._prompts: dict[int, tuple[Tensor, int]] = {}
        self._kv = allocate_caches(model.kv_groups, device, layout, dtype, quantized)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Raises SequenceFault when one sequence cannot be prepared; nothing is computed then."""
        self._move(plan.moves)
        for sequence_id in plan.removed:
            self._forget(sequence_id)
        for new in plan.added:
            self._learn(new)
        chunks = plan.chunks
        rows = self._rows.of(chunks)
        batch, last_tokens = self._builder.build(chunks, rows)
        hidden = self._model.forward(batch, self._kv)
        prompt_logprobs = self._prompt_logprobs(chunks, hidden, last_tokens)
        sampling = np.flatnonzero(np.fromiter((c.sample for c in chunks), bool, len(chunks)))
        if not len(sampling):
            return StepResult([], prompt_logprobs)
        hidden = hidden[self._device.upload(torch.from_numpy(last_tokens[sampling]))]
        logits = self._model.logits(hidden)
        if self._rank != 0:
            return StepResult([], {})
        sampled = self._sampler.sample(logits, [chunks[i] for i in sampling], rows[sampling])
        usable = self._device.download(hidden.sum(-1, dtype=torch.float32).isfinite()).tolist()
        return StepResult([s if u else None for s, u in zip(sampled, usable, strict=True)], prompt_logprobs)

    def _move(self, moves: Sequence[Move]) -> None:
        """Before all that may fail: a step that fails is planned again without its moves."""
        for move in moves:
            for layer in self._model.kv_groups[move.group].layers:
                self._device.copy_block(self._kv[layer], move.source, move.target)

    def _learn(self, new: NewSequence) -> None:
        try:
            self._sampler.add(self._rows.add(new.sequence_id), new)
            if (top := new.sampling.num_prompt_logprobs(self._vocab_size)) is not None:
                self._prompts[new.sequence_id] = (torch.tensor(new.prompt_token_ids, dtype=torch.int64), top)
        except Exception as err:
            raise SequenceFault(new.sequence_id) from err

    def _forget(self, sequence_id: int) -> None:
        row = self._rows.remove(sequence_id)
        if row is not None:
            self._sampler.remove(row)
        self._prompts.pop(sequence_id, None)

    def _prompt_logprobs(
        self, chunks: Sequence[Chunk], hidden: Tensor, last_tokens: Indices
    ) -> dict[int, list[TokenLogprobs]]:
        """By sequence id, of the prompt tokens that follow the tokens of chunks that ask for it."""
        found: dict[int, list[TokenLogprobs]] = {}
        at_once = max(1, LOGITS_AT_ONCE // self._vocab_size)
        for chunk, last in zip(chunks, last_tokens.tolist(), strict=True):
            if not chunk.prompt_logprobs:
                continue
            prompt, top = self._prompts[chunk.sequence_id]
            following = prompt[chunk.start + 1 : chunk.end + 1]
            first = last + 1 - len(chunk.token_ids)
            mine = found[chunk.sequence_id] = []
            for start in range(0, len(following), at_once):
                targets = following[start : start + at_once]
                logits = self._model.logits(hidden[first + start : first + start + len(targets)])
                if self._rank == 0:
                    mine += token_logprobs(self._device, logits, self._device.upload(targets), [top] * len(targets))
        return found


def allocate_caches(
    groups: tuple[KVGroup, ...], device: Device, layout: KVLayout, dtype: torch.dtype, quantized: KVFormat | None
) -> list[KVCache]:
    """One cache a layer, in layer order. Raises NotEnoughMemory."""
    with allocating("the KV cache", "free memory, raise its limit (ulimit -v), or lower --kv-cache-memory-bytes"):
        caches = {
            layer: device.allocate_kv(group.spec, blocks, layout.page_size, dtype, quantized)
            for group, blocks in zip(groups, layout.num_blocks, strict=True)
            for layer in group.layers
        }
    return [caches[layer] for layer in sorted(caches)]
