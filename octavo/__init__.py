"""Octavo: serves large language models on Ascend NPUs, CPUs and GPUs.

Importing this package imports nothing heavy; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.adapters import LoRARequest
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.beam_search import BeamSearchOutput, BeamSearchParams
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.engine.types import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "BeamSearchOutput", "BeamSearchParams", "CompletionOutput", "LoRARequest",
    "RepetitionDetectionParams", "RequestOutput", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams",
    "__version__",
]  # fmt: skip

_LAZY = {
    "LLM": "octavo.engine.llm",
    "AsyncLLM": "octavo.engine.async_llm",
    "LoRARequest": "octavo.engine.adapters",
    "BeamSearchOutput": "octavo.engine.beam_search",
    "BeamSearchParams": "octavo.engine.beam_search",
    "CompletionOutput": "octavo.engine.outputs",
    "RequestOutput": "octavo.engine.outputs",
    "RepetitionDetectionParams": "octavo.engine.types",
    "RequestOutputKind": "octavo.engine.types",
    "SamplingParams": "octavo.engine.types",
    "StructuredOutputsParams": "octavo.engine.types",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
