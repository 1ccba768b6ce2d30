"""Routes that say what is here and how it is doing, and turn text into tokens and back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.engine.admission import DEFAULTS
from octavo.engine.types import SamplingParams
from octavo.errors import InvalidRequest, Overloaded
from octavo.server.replies import json_response
from octavo.server.serving import Serving
from octavo.server.stream import until_gone
from octavo.wire.requests import DetokenizeRequest, TokenizeRequest, plain_messages
from octavo.wire.responses import ModelCard, ModelList, ModelPermission


async def health(serving: Serving, request: Request) -> Response:
    """200 while the engine steps; says so within about a second."""
    if serving.draining:
        raise Overloaded("the server is shutting down", retry_after_s=10, fix="send the request elsewhere")
    await serving.llm.check_health()
    return Response(status_code=200)


async def version(serving: Serving, request: Request) -> Response:
    known = serving.llm.facts
    return json_response(
        {
            "version": octavo.__version__, "model": serving.llm.model_names[0], "device": known.device,
            "dtype": known.dtype, "kv_cache_dtype": known.kv_cache_dtype, "kernels": known.kernels,
            "max_model_len": known.max_model_len, "block_size": known.block_size, "num_blocks": known.num_blocks,
            "weights_bytes": known.weights_bytes, "kv_cache_bytes": known.kv_cache_bytes,
            "load_seconds": round(known.load_seconds, 3),
            "fingerprint": known.fingerprint,
            "default_sampling": default_sampling(serving.llm.default_params),
        }
    )  # fmt: skip


def default_sampling(own: Mapping[str, Any]) -> dict[str, Any]:
    """What a request gets that says nothing: the model's own values over the general ones.

    `max_tokens` is among them only where the model names it, since its general value is each route's own.
    """
    params = msgspec.structs.asdict(SamplingParams(**own))
    return {name: params[name] for name in DEFAULTS.values() if name != "max_tokens" or name in own}


async def metrics(serving: Serving, request: Request) -> Response:
    return Response(serving.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


async def load(serving: Serving, request: Request) -> Response:
    return json_response({"server_load": serving.open_requests})


def _card(serving: Serving, name: str) -> ModelCard:
    permission = ModelPermission(f"modelperm-{name}", serving.started)
    card = ModelCard(name, serving.started, serving.llm.args.model, serving.llm.max_model_len, [permission])
    if name in serving.llm.adapters:
        card.root, card.parent = serving.llm.adapters[name].path, serving.llm.model_names[0]
    return card


async def models(serving: Serving, request: Request) -> Response:
    names = (*serving.llm.model_names, *serving.llm.adapters)
    return json_response(ModelList([_card(serving, name) for name in names]))


async def model(serving: Serving, request: Request) -> Response:
    name = request.path_params["model_id"]
    serving.check_model(name)
    return json_response(_card(serving, name))


async def tokenize(serving: Serving, request: Request) -> Response:
    asked = await serving.read(request, TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("give either prompt or messages", fix="send one of the two", param="prompt")
    ids = await until_gone(request, _tokens(serving, asked))

    def answer() -> Response:
        texts = [serving.llm.token_text(i) for i in ids] if asked.return_token_strs else None
        return json_response(
            {"count": len(ids), "max_model_len": serving.llm.max_model_len, "tokens": ids, "token_strs": texts}
        )

    return await asyncio.to_thread(answer)


async def _tokens(serving: Serving, asked: TokenizeRequest) -> list[int]:
    if asked.prompt is not None:
        return await serving.llm.encode(asked.prompt, asked.add_special_tokens is not False)
    _, ids = await serving.llm.render(
        plain_messages(asked.messages or []), add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message, add_special_tokens=bool(asked.add_special_tokens),
        template_kwargs=asked.chat_template_kwargs,
    )  # fmt: skip
    return ids


async def detokenize(serving: Serving, request: Request) -> Response:
    asked = await serving.read(request, DetokenizeRequest)
    return json_response({"prompt": await asyncio.to_thread(_text, serving, asked.tokens)})


def _text(serving: Serving, tokens: list[int]) -> str:
    last = serving.llm.config.vocab_size - 1
    wrong = next((token for token in tokens if not 0 <= token <= last), None)
    if wrong is not None:
        raise InvalidRequest(f"tokens holds {wrong}", limit=f"0 to {last}", fix="remove it", param="tokens")
    return serving.llm.tokenizer.decode(tokens, skip_special_tokens=False)
