"""Guesses of a smaller model with the same tokens, drawn with the noise and the parameters of the sequence itself.

It computes every token that the model computes, in the same steps, and keeps its keys and values in the same blocks of
caches of its own. So what is preempted, shared, copied or moved holds for it as well, and it needs no accounts.
After a step it computes the chunks again without the guesses that were wrong, and the new token after them; from there
on one token at a time, all sequences together. Keys and values of guesses beyond the last block lie in a few blocks
that each row has for that, and nobody relies on them after the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.backends.base import Device, KVCache, allocating
from octavo.backends.kv import KVFormat, KVGroup, KVSpec, SlidingWindow
from octavo.config import Speculation
from octavo.engine.batch import BatchBuilder, Indices, Table
from octavo.engine.drafting import DraftLengths, Given
from octavo.engine.pages import KVLayout
from octavo.engine.plan import Chunk, NewSequence
from octavo.engine.sampler import Sampler
from octavo.errors import UsageError
from octavo.models.decoder import Decoder


@dataclass(frozen=True)
class DraftGroup:
    """Layers of the draft model of one spec, and the KV group of the model whose blocks they use."""

    spec: KVSpec
    layers: tuple[int, ...]
    group: int


def place_layers(draft: Sequence[KVGroup], target: Sequence[KVSpec]) -> list[DraftGroup]:
    """Gives each group of the draft model one of the model that keeps all that it looks at.

    Raises UsageError where there is none: the model's sliding windows may free earlier.
    """
    placed = []
    for own in draft:
        reach = _reach(own.spec)
        fitting = [g for g, spec in enumerate(target) if _reach(spec) >= reach]
        if not fitting:
            raise UsageError(
                f"--speculative-config: the draft model looks back {'at all tokens' if reach == ALL else reach}",
                limit=f"{max(map(_reach, target))} tokens, which are all that the model keeps",
                fix="choose a draft model of the same family, or method ngram", param="speculative_config",
            )  # fmt: skip
        placed.append(DraftGroup(own.spec, own.layers, fitting[0]))
    return placed


ALL = 1 << 62


def _reach(spec: KVSpec) -> int:
    return spec.window if isinstance(spec, SlidingWindow) else ALL


def spare_blocks(speculation: Speculation | None, page_size: int) -> int:
    """Blocks of each row for guesses beyond its last block."""
    assert speculation is not None, "only with a draft model"
    return -(-speculation.num_speculative_tokens // page_size)


class DraftCaches:
    """The draft model's keys and values, with blocks like the model's, and spare ones after them."""

    def __init__(
        self, model: Decoder, device: Device, layout: KVLayout, dtype: torch.dtype, quantized: KVFormat | None,
        max_num_seqs: int, speculation: Speculation,
    ) -> None:  # fmt: skip
        spare = max_num_seqs * spare_blocks(speculation, layout.page_size)
        self.groups = place_layers(model.kv_groups, layout.specs)
        self.first_spare = layout.num_blocks
        self.of_layer: dict[int, KVCache] = {}
        with allocating("the draft model's KV cache", "free memory, or lower --kv-cache-memory-bytes"):
            for own in self.groups:
                blocks = layout.num_blocks[own.group] + spare
                for layer in own.layers:
                    self.of_layer[layer] = device.allocate_kv(own.spec, blocks, layout.page_size, dtype, quantized)
        self.in_order = [self.of_layer[layer] for layer in sorted(self.of_layer)]
        model.scale_caches(self.in_order)
        model.scale_caches(self.in_order)

    def of_group(self, group: int) -> list[KVCache]:
        """Caches whose blocks lie where those of the model's KV group lie."""
        return [self.of_layer[layer] for own in self.groups if own.group == group for layer in own.layers]


class DraftModelProposer:
    """Implements `drafting.Proposer`, on rank 0, which has all of the draft model."""

    def __init__(
        self, speculation: Speculation, model: Decoder, device: Device, caches: DraftCaches, builder: BatchBuilder,
        sampler: Sampler, page_size: int, max_model_len: int, vocab_size: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self._model, self._device, self._caches = model, device, caches
        self._builder, self._sampler, self._page_size = builder, sampler, page_size
        self._lengths = DraftLengths(speculation, max_model_len, eos_token_ids)
        self._spare = spare_blocks(speculation, page_size)
        self._vocab_size = vocab_size

    def add(self, row: int, new: NewSequence) -> None:
        self._lengths.add(row, new)

    def remove(self, row: int) -> None:
        self._lengths.remove(row)

    def propose(self, chunks: Sequence[Chunk], rows: Sequence[int], given: Sequence[Given]) -> dict[int, list[int]]:
        counts = self._lengths.of(chunks, rows, given)
        texts = [_followed(*one) for one in zip(chunks, given, counts, strict=True)]
        starts = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        tables = self._tables(chunks, np.array(rows), int((starts + lengths + np.array(counts)).max()))
        batch = self._builder.assemble(self._known(t for text in texts for t in text), starts, lengths, tables)
        hidden = self._model.forward(batch, self._caches.in_order)
        drafting = np.flatnonzero(counts)
        if not len(drafting):
            return {}
        last = self._device.upload(torch.from_numpy((np.cumsum(lengths) - 1)[drafting]))
        return self._draft(hidden[last], chunks, rows, counts, starts + lengths, tables, drafting)

    def _draft(
        self, hidden: Tensor, chunks: Sequence[Chunk], rows: Sequence[int], counts: Sequence[int], ends: Indices,
        tables: Sequence[Table], drafting: Indices,
    ) -> dict[int, list[int]]:  # fmt: skip
        """Guesses one token at a time after `ends` for the chunks `drafting`, which `hidden` [D, H] has a row for."""
        drafts: dict[int, list[int]] = {int(i): [] for i in drafting}
        for step in range(max(counts)):
            guesses = self._sampler.guess(self._logits(hidden), np.array(rows)[drafting], ends[drafting] + step)
            going_on = []
            for place, guess in zip(drafting.tolist(), guesses, strict=True):
                if guess is not None:
                    drafts[place].append(guess)
                    over = step + 1 == counts[place] or self._lengths.ends(rows[place], guess)
                    going_on += [] if over else [place]
            if not going_on:
                break
            drafting = np.array(going_on)
            tokens = self._known(drafts[place][-1] for place in going_on)
            one_each = np.ones(len(going_on), np.int64)
            batch = self._builder.assemble(
                tokens, ends[drafting] + step, one_each, [table[drafting] for table in tables]
            )
            hidden = self._model.forward(batch, self._caches.in_order)
        for place, draft in drafts.items():
            self._sampler.take_back(rows[place], len(draft))
        return {chunks[place].sequence_id: draft for place, draft in drafts.items() if draft}

    def _tables(self, chunks: Sequence[Chunk], rows: Indices, longest: int) -> list[Table]:
        """Block tables of each of the draft model's groups for `longest` tokens, spare blocks after the chunks' last
        block."""
        width = -(-longest // self._page_size)
        ends = np.fromiter((c.end for c in chunks), np.int64, len(chunks))
        beyond = np.arange(width) - -(-ends // self._page_size)[:, None]
        spare = rows[:, None] * self._spare + np.minimum(beyond, self._spare - 1)
        return [
            np.where(beyond < 0, _padded(self._builder.tables[own.group][rows], width),
                     self._caches.first_spare[own.group] + spare).astype(np.int32)
            for own in self._caches.groups
        ]  # fmt: skip

    def _known(self, tokens: Iterable[int]) -> Iterable[int]:
        """Tokens that pad the model's vocabulary may be beyond that of the draft model."""
        highest = self._model.spec.vocab_size - 1
        return (min(token, highest) for token in tokens)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Float32 [R, V] with the model's V: vocabularies may be padded differently."""
        logits = self._model.logits(hidden)
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits


def _followed(chunk: Chunk, given: Given, count: int) -> list[int]:
    """The chunk's tokens without wrong guesses, and the one after them where more is to be guessed."""
    known = chunk.token_ids[: len(chunk.token_ids) - chunk.num_drafts]
    return known + (given or [])[: None if count else -1]


def _padded(table: Table, width: int) -> Table:
    return np.pad(table, ((0, 0), (0, max(0, width - table.shape[1]))))[:, :width]
