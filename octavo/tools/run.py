"""`octavo run`: one question with its answer on stdout, or a chat in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from octavo.config import EngineArgs
from octavo.errors import UsageError
from octavo.server.args import GroupedOption, collect, options
from octavo.tools.command import Command
from octavo.tools.program import complain, raise_on_interrupt
from octavo.tools.serve import require_torch

EXAMPLES = """
octavo run smollm2                                    (a chat; /help lists its commands)
octavo run smollm2 "What is a page table?"
octavo run smollm2 --temperature 0 --json < question.txt
octavo run ./model.gguf --system "Answer in French." --max-tokens 200 "Who are you?"
"""
MAX_PROMPT_BYTES = 16 << 20
"""as much as a server takes in a request"""
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LORA = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank")
"""flags of what only a request can choose"""
HELP = {
    "max_tokens": "Longest answer, in tokens.",
    "temperature": "0 always takes the likeliest token.",
    "top_p": "Keep the likeliest tokens up to this probability.",
    "top_k": "Keep this many of the likeliest tokens.",
    "min_p": "Drop tokens below this share of the likeliest one's probability.",
    "repetition_penalty": "Above 1: make tokens that came before less likely.",
}


def run(words: Sequence[str], system: str | None, as_json: bool, **given: Any) -> int:
    engine_args, _ = collect(given)
    require_torch()
    sampling = _sampling(given)
    if len(words) > 1:
        raise UsageError(f"the prompt is {len(words)} arguments", limit="one", fix="put it between quotes")
    prompt = words[0] if words else None
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = _piped()
    if prompt is not None and not prompt.strip():
        raise UsageError("the prompt is empty", fix="octavo run MODEL 'a question', or give none to chat")
    if prompt is None and as_json:
        raise UsageError("--json needs a prompt", fix="octavo run MODEL --json 'a question'", param="json")
    from octavo.tools.session import Session

    raise_on_interrupt()
    with Session(engine_args) as session:
        if prompt is None:
            from octavo.tools.chat import Chat

            Chat(session, sampling, system).loop()
        else:
            ask(session, prompt, system, sampling, as_json)
    return 0


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that were given. Raises InvalidRequest for one out of range."""
    from octavo.engine.types import SamplingParams

    sampling = {name: given[name] for name in (*SAMPLING, "seed") if given.get(name) is not None}
    SamplingParams(**sampling).verify(vocab_size=1, max_logprobs=0)  # what depends on the model cannot be given here
    return sampling


def _piped() -> str:
    """All of stdin. Raises UsageError where that is endless or no text."""
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise UsageError("the prompt on stdin is too large", limit=f"{MAX_PROMPT_BYTES} bytes", fix="shorten it")
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on stdin is no text: {error}", fix="give it in UTF-8") from error


def ask(session: Any, prompt: str, system: str | None, sampling: dict[str, Any], as_json: bool) -> None:
    """The answer to stdout and nothing else there; how fast it came to stderr."""
    from octavo.engine.types import SamplingParams
    from octavo.tools.session import Answer

    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    params = SamplingParams(**{"max_tokens": None, **session.llm.default_params, **sampling})
    answer = Answer()
    for piece in session.stream(messages, params, answer, capped="max_tokens" not in sampling):
        if not as_json:
            print(piece, end="", flush=True)
    if as_json:
        print(
            json.dumps(
                {
                    "model": session.llm.model_names[0], "prompt": prompt, "text": answer.text,
                    "finish_reason": answer.finish_reason, "prompt_tokens": answer.prompt_tokens,
                    "completion_tokens": answer.completion_tokens, "tokens_per_second": answer.tokens_per_second,
                    "first_token_s": answer.first_token_s,
                },
                ensure_ascii=False,
            )
        )  # fmt: skip
    else:
        print(flush=True)
        complain(f"[{answer.summary()}]")


def _sampling_options() -> list[click.Parameter]:
    made: list[click.Parameter] = []
    for name in SAMPLING:
        kind = int if name in ("max_tokens", "top_k") else float
        option = GroupedOption([f"--{name.replace('_', '-')}", name], type=kind, help=HELP[name])
        option.group = "Answer"
        made.append(option)
    return made


command = Command(
    "run", EXAMPLES, callback=run, short_help="Ask one question, or chat in the terminal.",
    help="Answers PROMPT on stdout, or what is piped in; without either, opens a chat. MODEL is a name such as "
    "smollm2, a GGUF file, or a folder with config.json and safetensors.",
    params=[
        click.Argument(["model"]), click.Argument(["words"], nargs=-1, metavar="[PROMPT]"),
        click.Option(["--system"], help="Instructions that stand before the conversation."),
        click.Option(["--json", "as_json"], is_flag=True, help="One JSON object instead of the plain answer."),
        *_sampling_options(), *options([EngineArgs], without=("engine_restarts", *LORA)),
    ],
)  # fmt: skip
