"""`/generate`, the route of vLLM's demonstration server: a prompt in, `{"text": [prompt + completion, …]}` out.

A stream is one such object a line, each holding the text so far. (Older servers put a null byte between them.)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.types import SamplingParams
from octavo.errors import InvalidRequest, NotSupported
from octavo.server.replies import json_response
from octavo.server.serving import Choice, Prompt, Serving, json_body
from octavo.server.stream import EventStream, until_gone
from octavo.wire.errors import shown

PARAMETERS = frozenset(SamplingParams.__struct_fields__) - {
    "logprobs", "prompt_logprobs", "logprob_token_ids", "output_kind", "bad_word_ids", "thinking_marks",
}  # fmt: skip
HARMLESS: dict[str, tuple[object, ...]] = {"early_stopping": (False,)}
"""Fields of old clients that may be sent with these values, which change nothing. So may any field with null."""


class LineStream(EventStream):
    """One JSON object a line."""

    media_type = "application/x-ndjson"
    end = b""

    @staticmethod
    def failure(body: bytes) -> bytes:
        return body + b"\n"


async def generate(serving: Serving, request: Request) -> Response:
    prompt, stream, params = _read(await json_body(request))
    if stream and (params.best_of not in (None, params.n) or params.use_beam_search):
        name = "use_beam_search" if params.use_beam_search else "best_of"
        raise InvalidRequest(
            f"{name} is {shown(getattr(params, name))} in a stream", limit="only without stream, or best_of as n",
            fix="set stream to false", param=name,
        )  # fmt: skip
    token_ids = await until_gone(request, serving.llm.encode(prompt, params=params))
    asked = Prompt(prompt, token_ids, await until_gone(request, serving.llm.check(token_ids, params)))
    texts = _texts(serving, f"generate-{request.state.request_id}", asked)
    if stream:
        return await LineStream.begun(request, _lines(texts))
    return json_response({"text": await until_gone(request, _last(texts))})


def _read(body: bytes) -> tuple[str, bool, SamplingParams]:
    """Raises InvalidRequest naming the field at fault."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is no JSON object: {error}", fix='send {"prompt": "…"}') from error
    prompt, stream = fields.pop("prompt", None), fields.pop("stream", None)
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt is missing or no text", fix='send {"prompt": "…"}', param="prompt")
    if not isinstance(stream, bool | None):
        raise InvalidRequest(f"stream is {shown(stream)}", limit="true or false", fix="correct stream", param="stream")
    return prompt, bool(stream), _params(fields)


def _params(fields: dict[str, Any]) -> SamplingParams:
    for name, value in list(fields.items()):
        if name in PARAMETERS:
            continue
        if value is not None and value not in HARMLESS.get(name, ()):
            raise NotSupported(
                f"{name} is {shown(value)}, which /generate does not know", limit=", ".join(sorted(PARAMETERS)),
                fix=f"remove {name}, or use /v1/completions", param=name,
            )  # fmt: skip
        del fields[name]
    given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
    try:
        return SamplingParams(**given)
    except TypeError as error:
        raise InvalidRequest(f"stop or stop_token_ids: {error}", fix="send a list", param="stop") from error


async def _texts(serving: Serving, request_id: str, prompt: Prompt) -> AsyncGenerator[list[str], None]:
    """Prompt and completion of every choice, again and again as they grow."""
    choices = [Choice() for _ in range(prompt.params.n)]
    async with serving.open(request_id, [prompt], None) as merged:
        async for _, deltas in merged:
            for delta in deltas:
                choices[delta.index].add(delta)
            yield [f"{prompt.text}{choice.text}" for choice in choices]


async def _lines(texts: AsyncGenerator[list[str], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(texts):
        async for text in texts:
            yield msgspec.json.encode({"text": text}) + b"\n"


async def _last(texts: AsyncGenerator[list[str], None]) -> list[str]:
    last: list[str] = []
    async with aclosing(texts):
        async for text in texts:
            last = text
    return last
