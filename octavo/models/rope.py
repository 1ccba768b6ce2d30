"""The table of rotary cosines and sines, with the ways in which models stretch it to a longer context."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.models.spec import RopeSpec

_CHUNK_POSITIONS = 1 << 14


def rope_table(spec: RopeSpec, num_positions: int) -> Tensor:
    """float32 [num_positions, rotary_dim]: cosines then sines, computed in float64 and rounded once."""
    frequencies = inverse_frequencies(spec)
    scale = spec.attention_factor or 1.0
    table = torch.empty(num_positions, spec.rotary_dim)
    for start in range(0, num_positions, _CHUNK_POSITIONS):
        rows = table[start : start + _CHUNK_POSITIONS]
        angles = torch.outer(torch.arange(start, start + len(rows), dtype=torch.float64), frequencies)
        rows.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1) * scale)
    return table


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Radians a position of each pair of channels: float64 [rotary_dim / 2]."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64) / spec.rotary_dim
    plain = spec.theta**-exponents
    if spec.scaling == "linear":
        return plain / spec.factor
    if spec.scaling == "factors":
        return plain / torch.tensor(spec.factors, dtype=torch.float64)
    if spec.scaling == "llama3":
        return _llama3(plain, spec)
    if spec.scaling == "yarn":
        return _yarn(plain, spec)
    return plain


def _llama3(plain: Tensor, spec: RopeSpec) -> Tensor:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended (Llama 3.1's own code).

    A frequency's speed is how often it turns over the original context.
    """
    turns = spec.original_context * plain / (2 * math.pi)
    keep = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return plain * (keep + (1 - keep) / spec.factor)


def _yarn(plain: Tensor, spec: RopeSpec) -> Tensor:
    """As `_llama3`, but the blend is linear in the channel between those that turn beta_fast and beta_slow times
    (arXiv:2309.00071, section 3.2)."""

    def channel(turns: float) -> float:
        return spec.rotary_dim * math.log(spec.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = channel(spec.beta_fast), channel(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    span = max(high - low, 0.001)
    keep = 1 - ((torch.arange(spec.rotary_dim // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    return plain * (keep + (1 - keep) / spec.factor)
