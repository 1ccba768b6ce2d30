"""From a step's chunks to the tensors of a `ForwardBatch`, and the block tables that last between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from octavo.backends.base import AdapterRows, AttentionMeta, Device, ForwardBatch
from octavo.engine.pages import KVLayout
from octavo.engine.plan import Chunk

Indices = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]


class Rows:
    """Gives each known sequence a row in the host arrays of fixed height that hold what lasts between steps."""

    def __init__(self, height: int) -> None:
        self._row: dict[int, int] = {}
        self._free = list(range(height - 1, -1, -1))

    def add(self, sequence_id: int) -> int:
        """A row; that which it has, if it has one."""
        if sequence_id not in self._row:
            self._row[sequence_id] = self._free.pop()
        return self._row[sequence_id]

    def remove(self, sequence_id: int) -> int | None:
        row = self._row.pop(sequence_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def of(self, chunks: Sequence[Chunk]) -> Indices:
        return np.fromiter((self._row[c.sequence_id] for c in chunks), np.int64, len(chunks))


class BatchBuilder:
    """Keeps the block tables [rows, max_blocks] of each KV group; everything of a step is uploaded once."""

    def __init__(self, layout: KVLayout, height: int, max_model_len: int, device: Device) -> None:
        self._page_size = layout.page_size
        width = -(-max_model_len // layout.page_size)
        self.tables: list[Table] = [np.zeros((height, width), np.int32) for _ in layout.specs]
        self._adapters = np.zeros(height, np.int64)
        self._device = device

    def set_adapter(self, row: int, number: int) -> None:
        """Which adapter computes the sequence of that row; 0 for the base model."""
        self._adapters[row] = number

    def build(self, chunks: Sequence[Chunk], rows: Indices) -> tuple[ForwardBatch, Indices]:
        """The batch, and for each chunk the row of its last token among the batch's tokens [S]."""
        for chunk, row in zip(chunks, rows.tolist(), strict=True):
            if any(chunk.new_blocks):  # in decoding, one step in page_size
                for table, first, new in zip(self.tables, chunk.first_new_block, chunk.new_blocks, strict=True):
                    table[row, first : first + len(new)] = new
        lengths = np.fromiter((len(c.token_ids) for c in chunks), np.int64, len(chunks))
        starts = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
        tokens = chain.from_iterable(c.token_ids for c in chunks)
        width = -(-int((starts + lengths).max()) // self._page_size)
        tables = [table[rows, :width] for table in self.tables]
        return self.assemble(tokens, starts, lengths, tables, self._adapter_rows(rows, lengths)), np.cumsum(lengths) - 1

    def assemble(
        self, token_ids: Iterable[int], starts: Indices, lengths: Indices, tables: Sequence[Table],
        adapters: tuple[AdapterRows, ...] = (),
    ) -> ForwardBatch:  # fmt: skip
        """Of `lengths[s]` tokens at positions from `starts[s]`, with `tables[g][s]` as block tables."""
        ends, owners, positions = lengths.cumsum(), np.arange(len(lengths)), starts
        tokens = np.fromiter(token_ids, np.int64, int(ends[-1]))
        if len(tokens) > len(lengths):
            owners = np.repeat(owners, lengths)
            positions = np.arange(len(tokens)) + np.repeat(starts - (ends - lengths), lengths)
        first_tokens = np.zeros(len(ends) + 1, np.int32)
        first_tokens[1:] = ends
        query_start, seq_lens = self._upload(first_tokens), self._upload((starts + lengths).astype(np.int32))
        block, offset = np.divmod(positions, self._page_size)
        attention = tuple(
            AttentionMeta(
                query_start, seq_lens, self._upload(table),
                self._upload(table[owners, block].astype(np.int64) * self._page_size + offset), self._page_size,
            )
            for table in tables
        )  # fmt: skip
        return ForwardBatch(self._upload(tokens), self._upload(positions), attention, adapters)

    def _adapter_rows(self, rows: Indices, lengths: Indices) -> tuple[AdapterRows, ...]:
        numbers = self._adapters[rows]
        if not numbers.any():
            return ()
        if (numbers == numbers[0]).all():
            return (AdapterRows(int(numbers[0]), None),)
        of_token = np.repeat(numbers, lengths)
        used = [int(number) for number in np.unique(numbers) if number]
        return tuple(AdapterRows(number, self._upload(np.flatnonzero(of_token == number))) for number in used)

    def _upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return self._device.upload(torch.from_numpy(array))
