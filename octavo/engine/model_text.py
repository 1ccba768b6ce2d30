"""What the API process knows of a model: its settings, tokenizer and chat template. No torch."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from octavo.backends.names import reads_weights
from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.engine.admission import default_params
from octavo.engine.messages import Progress
from octavo.errors import BadModelFile, ModelNotFound, UsageError
from octavo.formats.text_file import as_path, shown, usable
from octavo.hub.resolve import resolve_model
from octavo.models.checkpoint import GENERATION_CONFIG, Checkpoint, open_checkpoint
from octavo.models.spec import check_divisible
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("octavo.engine")
T = TypeVar("T")
OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class LoadedModel:
    config: EngineConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None for a model that was not made for chat"""
    default_params: dict[str, Any]
    """sampling parameters of requests that bring none"""


def prepare(args: EngineArgs, on_progress: OnProgress | None) -> LoadedModel:
    """All that comes before the engine starts. Reads files and may download.

    Raises ModelNotFound, BadModelFile, TemplateError or UsageError.
    """
    args.verify()
    path = resolve_model(args.model, args.download_dir, _fetching(on_progress))
    with usable(args.model, "model"):
        checkpoint = open_checkpoint(path, weights=reads_weights(args.device))
    checkpoint = _with_generation_config(checkpoint, args.generation_config)
    config = resolve(args, checkpoint.facts())
    _check_adapter_folders(config)
    check_divisible(checkpoint.spec, config.tensor_parallel_size)
    source = as_path(args.tokenizer, "tokenizer") if args.tokenizer else path
    with usable(args.tokenizer or args.model, "tokenizer"):
        tokenizer = load_tokenizer(source)
    check_vocabulary(tokenizer.vocab_size, config.vocab_size, source)
    config = replace(config, tokenizer=str(source.absolute()))
    if config.speculative_config is not None and config.speculative_config.model is not None:
        draft = find_draft(config.speculative_config.model, args, tokenizer, on_progress)
        config = replace(config, speculative_config=replace(config.speculative_config, model=str(draft)))
    defaults = default_params(checkpoint.generation_config, config.vocab_size)
    if defaults:
        listed = ", ".join(f"{name} {value}" for name, value in defaults.items())
        log.info("sampling defaults from %s: %s (--generation-config vllm: none)", GENERATION_CONFIG, listed)
    return LoadedModel(config, tokenizer, _template(args, tokenizer), defaults)


def _check_adapter_folders(config: EngineConfig) -> None:
    """Raises ModelNotFound; what is in the folders is looked at once the model is there."""
    for name, path in config.lora_modules:
        if not os.path.isdir(path):
            raise ModelNotFound(
                f"--lora-modules {shown(name)}={shown(path)}: no such folder", fix="give the folder that PEFT wrote",
                param="lora_modules",
            )  # fmt: skip


def check_vocabulary(tokens: int, rows: int, source: Path) -> None:
    """Raises BadModelFile for a tokenizer with more ids than the model has rows; warns of far fewer.

    A few fewer are usual: the model's rows are then padded to a round number.
    """
    fix = "use the tokenizer that the model was made with"
    if tokens > rows:
        raise BadModelFile(
            f"the tokenizer of {source} has {tokens} token ids", limit=f"the model knows {rows}", fix=fix,
            param="tokenizer",
        )  # fmt: skip
    if 2 * tokens < rows:
        log.warning("the tokenizer of %s has %d token ids, and the model knows %d: %s", source, tokens, rows, fix)


def find_draft(name: str, args: EngineArgs, tokenizer: Tokenizer, on_progress: OnProgress | None) -> Path:
    """The draft model's path. Raises what `prepare` does, and UsageError where its tokens are not those of the model,
    as its guesses would then mean something else."""
    path = resolve_model(name, args.download_dir, _fetching(on_progress))
    with usable(name, "speculative_config"):
        open_checkpoint(path, weights=reads_weights(args.device))
        other = load_tokenizer(path)
    for token in range(max(tokenizer.vocab_size, other.vocab_size)):
        if tokenizer.token_bytes(token) != other.token_bytes(token):
            theirs, ours = other.token_text(token), tokenizer.token_text(token)
            raise UsageError(
                f"--speculative-config: model {shown(name)} has other tokens than {shown(args.model)}",
                limit=f"the same, but token {token} is {theirs!r}, not {ours!r}",
                fix="choose a draft model of the same family, or method ngram", param="speculative_config",
            )  # fmt: skip
    return path


def _fetching(on_progress: OnProgress | None) -> Callable[[str, int, int], None] | None:
    if on_progress is None:
        return None
    return lambda stage, done, total: on_progress(Progress(stage, done, total))


def _with_generation_config(checkpoint: Checkpoint, source: str) -> Checkpoint:
    """`source` is "auto" (the model's own sampling defaults), "vllm" (none), or a folder that has others."""
    if source == "auto":
        return checkpoint
    if source == "vllm":
        return replace(checkpoint, generation_config={})
    folder = as_path(source, "generation_config")
    with usable(source, "generation_config"):
        if (folder / GENERATION_CONFIG).is_file():
            return checkpoint.with_generation_config(folder)
    raise UsageError(
        f"--generation-config {shown(source)}: no {GENERATION_CONFIG} is there",
        fix="auto (the model's own), vllm (none), or a folder that holds one", param="generation_config",
    )  # fmt: skip


def _template(args: EngineArgs, tokenizer: Tokenizer) -> ChatTemplate | None:
    source, tool_source = args.chat_template, None
    if source is None:
        source, tool_source = tokenizer.chat_template, tokenizer.tool_template
    elif "{" not in source:
        raise UsageError(
            f"chat_template {source!r} is no Jinja template", fix="give the template's text", param="chat_template"
        )
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens, tool_source)


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, but a program that is told to end does not wait for it: it may be downloading."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as err:
            result, error = None, err
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="octavo-prepare", daemon=True).start()
    return await done
