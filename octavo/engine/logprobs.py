"""Logprobs of raw logits, before anything that sampling parameters change: what vLLM calls raw_logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from octavo.backends.base import Device
from octavo.engine.types import TokenLogprobs

MANY = 256
"""a position that reports more is computed by itself, so that the others need not be sorted as far"""
NONE: Mapping[int, Sequence[int]] = {}


def token_logprobs(
    device: Device, logits: Tensor, tokens: Tensor, tops: Sequence[int], listed: Mapping[int, Sequence[int]] = NONE
) -> list[TokenLogprobs]:
    """Of raw `logits` [R, V]: for each of `tokens` [R] its logprob and rank, and those of the `tops[r]` best.

    Row r in `listed` has the logprobs of the tokens listed there in place of the best.
    """
    few = max((top for top in tops if top <= MANY), default=0)
    parts = device.ops.logprobs(logits, tokens, few)
    chosen, ranks, values, ids = (device.download(part).tolist() for part in parts)
    token_ids = device.download(tokens).tolist()
    found = []
    for r, (token, top) in enumerate(zip(token_ids, tops, strict=True)):
        if r in listed:
            others, theirs = list(listed[r]), _of_tokens(device, logits[r : r + 1], listed[r])
        elif top > MANY:
            others, theirs = _best(device, logits[r : r + 1], tokens[r : r + 1], top)
        else:
            others, theirs = ids[r][:top], values[r][:top]
        found.append(TokenLogprobs([token, *others], [chosen[r], *theirs], ranks[r]))
    return found


def _of_tokens(device: Device, row: Tensor, tokens: Sequence[int]) -> list[float]:
    wanted = device.upload(torch.tensor(tokens, dtype=torch.int64))
    values: list[float] = device.download(device.ops.log_softmax(row)[0][wanted]).tolist()
    return values


def _best(device: Device, row: Tensor, token: Tensor, top: int) -> tuple[list[int], list[float]]:
    _, _, values, ids = device.ops.logprobs(row, token, top)
    return device.download(ids)[0].tolist(), device.download(values)[0].tolist()
