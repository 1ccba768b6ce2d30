"""`octavo serve`: the OpenAI-compatible server."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import click

from octavo.config import EngineArgs, ServerArgs
from octavo.errors import UsageError
from octavo.server.args import collect, options
from octavo.tools.command import Command

EXAMPLES = """
octavo serve smollm2
octavo serve ./Qwen2.5-7B-Instruct --port 9000 --max-model-len 16K --api-key secret
octavo serve model.gguf --served-model-name coder --max-num-seqs 64 --threads 8
octavo serve --config settings.yaml
"""


def require_torch() -> None:
    """Raises UsageError where torch is not installed, before anything is started."""
    if find_spec("torch") is None:
        raise UsageError("torch is not installed", fix="pip install torch (the README names the CPU build)")


def make(old_generate: bool = False) -> Command:
    """The command; with `old_generate` it also serves `/generate`."""

    def serve(**given: Any) -> int:
        engine_args, server_args = collect(given)
        require_torch()
        from octavo.server.launch import serve as launch

        if not old_generate:
            return launch(engine_args, server_args)
        from octavo.server.generate_route import generate

        return launch(engine_args, server_args, {"/generate": generate})

    return Command(
        "serve", EXAMPLES, callback=serve, short_help="Serve a model over an OpenAI-compatible API.",
        help="Serves MODEL over an OpenAI-compatible API, with a chat page at /. MODEL is a name such as smollm2, "
        "a GGUF file, or a folder with config.json and safetensors.",
        params=[click.Argument(["model"]), *options([EngineArgs, ServerArgs])],
    )  # fmt: skip


command = make()
