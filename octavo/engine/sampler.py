"""What choosing tokens needs between steps, and the choice itself: `SamplingParams` to `SamplingTensors` to tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.backends.base import Device, Penalties, SamplingTensors
from octavo.engine.batch import Indices
from octavo.engine.noise import noise_keys, noise_stem
from octavo.engine.plan import Chunk, NewSequence, Sampled
from octavo.engine.types import TokenLogprobs

NO_LOGPROBS = -1


class TokenCounts:
    """The distinct tokens that penalties of one sequence touch, and how often each stands in its output.

    Arrays that grow by doubling: a step costs a copy of them, and a new token costs the same however long the output.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt) | dict.fromkeys(output)
        self._place = {token: index for index, token in enumerate(distinct)}
        self._tokens = np.fromiter(distinct, np.int64, len(distinct))
        self._counts = np.zeros(len(distinct), np.float32)
        self.num_known = 0
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """One more `token` in the output."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            room = max(16, place)
            self._tokens = np.concatenate((self._tokens, np.zeros(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
        self._tokens[place] = token
        self._counts[place] += 1

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self._tokens[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._place)]


class Sampler:
    """Rows as `batch.Rows` gives them."""

    def __init__(self, height: int, vocab_size: int, device: Device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._temperature, self._top_p, self._min_p = (np.zeros(height, np.float32) for _ in range(3))
        self._repetition, self._frequency, self._presence = (np.zeros(height, np.float32) for _ in range(3))
        self._top_k = np.zeros(height, np.int32)
        self._logprobs = np.zeros(height, np.int64)
        self._stems = np.zeros(height, np.uint64)
        self._filtered = np.zeros(height, bool)
        self._counts: dict[int, TokenCounts] = {}

    def add(self, row: int, new: NewSequence) -> None:
        p = new.sampling
        self._temperature[row], self._top_p[row], self._min_p[row] = p.temperature, p.top_p, p.min_p
        self._top_k[row] = min(p.top_k, self._vocab_size)
        self._filtered[row] = not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        self._repetition[row], self._frequency[row] = p.repetition_penalty, p.frequency_penalty
        self._presence[row] = p.presence_penalty
        self._logprobs[row] = NO_LOGPROBS if p.logprobs is None else p.logprobs
        self._stems[row] = noise_stem(new.seed, new.choice)
        self._counts.pop(row, None)
        if p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0:
            prompt = new.prompt_token_ids if p.repetition_penalty != 1 else []
            counts = self._counts[row] = TokenCounts(prompt, new.output_token_ids)
            counts.num_known = len(new.prompt_token_ids) + len(new.output_token_ids)

    def remove(self, row: int) -> None:
        self._counts.pop(row, None)

    def note(self, chunks: Sequence[Chunk], rows: Indices) -> None:
        """Counts the output tokens that these chunks bring and that were not known before."""
        if not self._counts:
            return
        for chunk, row in zip(chunks, rows.tolist(), strict=True):
            counts = self._counts.get(row)
            if counts is not None and chunk.end > counts.num_known:
                for token in chunk.token_ids[counts.num_known - chunk.start :]:
                    counts.add(token)
                counts.num_known = chunk.end

    def sample(self, logits: Tensor, rows: Indices, positions: Indices) -> list[Sampled]:
        """One token for each row of `logits` [R, V] (which may be overwritten), to stand at `positions` [R]."""
        wanted = self._logprobs[rows]
        reported = np.flatnonzero(wanted != NO_LOGPROBS)
        raw = logits[self._upload(reported)] if len(reported) else None
        tokens = self._device.ops.sample(logits, self._tensors(rows, positions))
        chosen = self._device.download(tokens).tolist()
        result = [Sampled(token) for token in chosen]
        if raw is not None:
            tops = wanted[reported].tolist()
            found = token_logprobs(self._device, raw, tokens[self._upload(reported)], tops)
            for index, logprobs in zip(reported.tolist(), found, strict=True):
                result[index] = Sampled(chosen[index], logprobs)
        return result

    def _tensors(self, rows: Indices, positions: Indices) -> SamplingTensors:
        keys = noise_keys(self._stems[rows], positions).view(np.int64)
        return SamplingTensors(
            self._upload(self._temperature[rows]), self._upload(self._top_k[rows]), self._upload(self._top_p[rows]),
            self._upload(self._min_p[rows]), self._upload(keys), all_greedy=not self._temperature[rows].any(),
            needs_filter=bool(self._filtered[rows].any()), penalties=self._penalties(rows),
        )  # fmt: skip

    def _penalties(self, rows: Indices) -> Penalties | None:
        touched = [(i, row, c) for i, row in enumerate(rows.tolist()) if (c := self._counts.get(row)) is not None]
        if not touched:
            return None
        sizes = [len(counts.tokens) for _, _, counts in touched]
        own_rows = np.array([row for _, row, _ in touched])
        return Penalties(
            self._upload(np.concatenate([i * self._vocab_size + counts.tokens for i, _, counts in touched])),
            self._upload(np.concatenate([counts.counts for _, _, counts in touched])),
            self._upload(np.repeat(self._repetition[own_rows], sizes)),
            self._upload(np.repeat(self._frequency[own_rows], sizes)),
            self._upload(np.repeat(self._presence[own_rows], sizes)),
        )

    def _upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return self._device.upload(torch.from_numpy(array))


def token_logprobs(device: Device, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Of raw `logits` [R, V]: for each of `tokens` [R] its logprob and rank, and those of the `tops[r]` best."""
    parts = device.ops.logprobs(logits, tokens, max(tops))
    chosen, ranks, values, ids = (device.download(part).tolist() for part in parts)
    token_ids = device.download(tokens).tolist()
    return [
        TokenLogprobs([token, *ids[r][:top]], [chosen[r], *values[r][:top]], ranks[r])
        for r, (token, top) in enumerate(zip(token_ids, tops, strict=True))
    ]
