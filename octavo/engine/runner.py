"""One rank's part of a step: plan to tensors, forward, and on rank 0 the choice of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.backends.base import Device, ForwardBatch, KVCache, allocating
from octavo.backends.kv import KVFormat, KVGroup
from octavo.config import Speculation
from octavo.engine.batch import BatchBuilder, Indices, Rows
from octavo.engine.block_store import BlockStore
from octavo.engine.draft_model import DraftCaches, DraftModelProposer
from octavo.engine.drafting import Proposer
from octavo.engine.grammar import Compiler
from octavo.engine.logprobs import token_logprobs
from octavo.engine.ngram import NgramProposer
from octavo.engine.pages import KVLayout
from octavo.engine.plan import Chunk, NewSequence, Sampled, SequenceFault, StepPlan, StepResult
from octavo.engine.sampler import Sampler
from octavo.engine.types import TokenLogprobs
from octavo.models.decoder import Decoder

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
        quantized: KVFormat | None = None, speculation: Speculation | None = None, draft_model: Decoder | None = None,
        compiler: Compiler | None = None, host_slots: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._model, self._device, self._rank, self._vocab_size = model, device, rank, vocab_size
        self._rows = Rows(max_num_seqs)
        self._builder = BatchBuilder(layout, max_num_seqs, max_model_len, device)
        self._sampler = Sampler(max_num_seqs, vocab_size, device, eos_token_ids, compiler)
        self._prompts: dict[int, tuple[Tensor, int]] = {}
        self._kv = allocate_caches(model.kv_groups, device, layout, dtype, quantized)
        if isinstance(model, Decoder):
            model.scale_caches(self._kv)
        moved = [[self._kv[layer] for layer in group.layers] for group in model.kv_groups]
        self._proposer: Proposer | None = None
        if rank == 0 and speculation is not None and draft_model is None:
            self._proposer = NgramProposer(speculation, max_model_len, eos_token_ids)
        elif rank == 0 and speculation is not None and draft_model is not None:
            caches = DraftCaches(draft_model, device, layout, dtype, quantized, max_num_seqs, speculation)
            for group, mine in enumerate(moved):
                mine += caches.of_group(group)
            self._proposer = DraftModelProposer(
                speculation, draft_model, device, caches, self._builder, self._sampler, layout.page_size,
                max_model_len, vocab_size, eos_token_ids,
            )  # fmt: skip
        self.store = BlockStore(device, moved, host_slots or (0,) * len(moved))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Raises SequenceFault when one sequence cannot be prepared; nothing is computed then."""
        self.store.do(plan.moves)  # before all that may fail: a step that fails is planned again without its moves
        for sequence_id in plan.removed:
            self._forget(sequence_id)
        for new in plan.added:
            self._learn(new)
        chunks = plan.chunks
        if not chunks:
            return StepResult([], {})
        rows = self._rows.of(chunks)
        batch, last_tokens = self._builder.build(chunks, rows)
        self._sampler.begin(chunks, rows)
        hidden = self._model.forward(batch, self._kv)
        prompt_logprobs = self._prompt_logprobs(chunks, hidden, last_tokens)
        following = self._sample(chunks, rows, hidden, last_tokens)
        if self._rank != 0:
            return StepResult([], {})
        drafts, faults = self._propose(chunks, rows, following), self._faults(chunks, rows, following)
        return StepResult(following, prompt_logprobs, drafts, faults)

    def _sample(
        self, chunks: Sequence[Chunk], rows: Indices, hidden: Tensor, last_tokens: Indices
    ) -> list[list[Sampled] | None]:
        """For each chunk with `sample`, what follows it; nothing on other ranks than 0."""
        sampling = np.fromiter((c.sample for c in chunks), bool, len(chunks)).nonzero()[0]
        if not len(sampling):
            return []
        chosen = [chunk for chunk in chunks if chunk.sample]
        places = np.fromiter((c.num_drafts + 1 for c in chosen), np.int64, len(chosen))
        ends = places.cumsum()
        if ends[-1] < hidden.shape[0]:  # else each token is sampled after
            index = np.arange(ends[-1]) + np.repeat(last_tokens[sampling] + 1 - ends, places)
            hidden = hidden[self._device.upload(torch.from_numpy(index))]
        logits = self._model.logits(hidden)
        if self._rank != 0:
            return []
        sampled = self._sampler.sample(logits, chosen, rows[sampling])
        usable = np.isfinite(self._device.download(hidden.sum(-1, dtype=torch.float32)).numpy())
        if usable.all():
            return [*sampled]
        return [_numbers(s, u) for s, u in zip(sampled, np.split(usable, ends[:-1]), strict=True)]

    def _faults(
        self, chunks: Sequence[Chunk], rows: Indices, following: Sequence[list[Sampled] | None]
    ) -> dict[int, str]:
        if [] not in following:
            return {}
        sampling = [(c.sequence_id, row) for c, row in zip(chunks, rows.tolist(), strict=True) if c.sample]
        known = {
            i: self._sampler.fault(row) for (i, row), tokens in zip(sampling, following, strict=True) if tokens == []
        }
        return {sequence_id: fault for sequence_id, fault in known.items() if fault is not None}

    def _propose(
        self, chunks: Sequence[Chunk], rows: Indices, following: Sequence[list[Sampled] | None]
    ) -> dict[int, list[int]]:
        if self._proposer is None:
            return {}
        sampled = iter(following)
        answers = [next(sampled) if chunk.sample else None for chunk in chunks]
        given = [None if answer is None else [one.token_id for one in answer] for answer in answers]
        return self._proposer.propose(chunks, rows.tolist(), given)

    def _learn(self, new: NewSequence) -> None:
        try:
            row = self._rows.add(new.sequence_id)
            self._builder.set_adapter(row, new.adapter)
            self._sampler.add(row, new)
            if self._proposer is not None:
                self._proposer.add(row, new)
            if (top := new.sampling.num_prompt_logprobs(self._vocab_size)) is not None:
                self._prompts[new.sequence_id] = (torch.tensor(new.prompt_token_ids, dtype=torch.int64), top)
        except Exception as err:
            raise SequenceFault(new.sequence_id) from err

    def _forget(self, sequence_id: int) -> None:
        row = self._rows.remove(sequence_id)
        if row is not None:
            self._sampler.remove(row)
            if self._proposer is not None:
                self._proposer.remove(row)
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


def _numbers(sampled: list[Sampled], usable: npt.NDArray[np.bool_]) -> list[Sampled] | None:
    """Of what was sampled, as far as the model's output was `usable` numbers."""
    return sampled[: int(usable.argmin())] or None if not usable.all() else sampled


def allocate_caches(
    groups: tuple[KVGroup, ...], device: Device, layout: KVLayout, dtype: torch.dtype, quantized: KVFormat | None = None
) -> list[KVCache]:
    """One cache a layer, in layer order. Raises NotEnoughMemory."""
    with allocating("the KV cache", "free memory, raise its limit (ulimit -v), or lower --kv-cache-memory-bytes"):
        caches = {
            layer: device.allocate_kv(group.spec, blocks, layout.page_size, dtype, quantized)
            for group, blocks in zip(groups, layout.num_blocks, strict=True)
            for layer in group.layers
        }
    return [caches[layer] for layer in sorted(caches)]
