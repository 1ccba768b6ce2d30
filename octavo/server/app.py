"""The HTTP application: which route is served by what, and what surrounds all of them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

import octavo
from octavo.errors import OctavoError
from octavo.server import adapters, chat, completions, facts
from octavo.server.middleware import Admitted, Authenticated, BodyLimit, HeadAsGet, Observed, RequestId
from octavo.server.replies import error_response
from octavo.server.serving import Serving
from octavo.server.stream import CLIENT_GONE, ClientGone
from octavo.wire.errors import INTERNAL, error_body
from octavo.wire.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)

log = logging.getLogger("octavo.server")
PAGE = Path(__file__).parent / "static" / "index.html"
Handler = Callable[[Serving, Request], Awaitable[Response]]

POSTS: dict[str, tuple[Handler, type[BaseModel] | None]] = {
    "/v1/chat/completions": (chat.chat_completions, ChatRequest),
    "/v1/completions": (completions.completions, CompletionRequest),
    "/tokenize": (facts.tokenize, TokenizeRequest),
    "/detokenize": (facts.detokenize, DetokenizeRequest),
    "/ping": (facts.health, None),
}
ADAPTER_POSTS: dict[str, tuple[Handler, type[BaseModel] | None]] = {
    "/v1/load_lora_adapter": (adapters.load, LoadAdapterRequest),
    "/v1/unload_lora_adapter": (adapters.unload, UnloadAdapterRequest),
}
"""without --enable-lora they only say so, as they let clients name folders to read"""
GETS: dict[str, Handler] = {
    "/v1/models": facts.models,
    "/health": facts.health,
    "/ping": facts.health,
    "/version": facts.version,
    "/metrics": facts.metrics,
    "/load": facts.load,
}


def build_app(serving: Serving, routes: Mapping[str, Handler] | None = None) -> ASGIApp:
    """`routes` are further paths to POST to."""
    app = FastAPI(title="Octavo", version=octavo.__version__, docs_url=None, redoc_url=None)
    posts = {**POSTS, **ADAPTER_POSTS}
    if not serving.llm.args.enable_lora:
        posts.update({path: (adapters.off, body) for path, (_, body) in ADAPTER_POSTS.items()})
    for path, (handler, body) in posts.items():
        app.add_api_route(path, _bound(serving, handler), methods=["POST"], openapi_extra=_schema(body))
    for path, handler in (routes or {}).items():
        app.add_api_route(path, _bound(serving, handler), methods=["POST"])
    for path, getter in GETS.items():
        app.add_api_route(path, _bound(serving, getter), methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", _bound(serving, facts.model), methods=["GET"])
    app.add_api_route("/", _page, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(OctavoError, _octavo_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _our_bug)
    return _surrounded(app, serving)


def _surrounded(app: ASGIApp, serving: Serving) -> ASGIApp:
    """From the inside out."""
    args = serving.args
    app = BodyLimit(app, args.max_body_bytes)
    app = Admitted(app, serving)
    if args.api_keys:
        app = Authenticated(app, args.api_keys)
    if args.allowed_origins:
        app = CORSMiddleware(app, allow_origins=args.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    return HeadAsGet(RequestId(Observed(app, serving.metrics.http)))


def _bound(serving: Serving, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(serving, request)

    endpoint.__name__ = handler.__name__
    return endpoint


def _schema(body: type[BaseModel] | None) -> dict[str, Any] | None:
    if body is None:
        return None
    schema = body.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _page() -> FileResponse:
    return FileResponse(PAGE, media_type="text/html; charset=utf-8", headers={"cache-control": "no-cache"})


async def _octavo_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OctavoError)
    if error.status == 500:
        log.error("%s %s: %s", request.method, request.url.path, error)
    return error_response(error)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: paths and methods that there are none of."""
    assert isinstance(error, HTTPException)
    kinds = {404: "NotFoundError", 405: "MethodNotAllowedError"}
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = error_body(message, kinds.get(error.status_code, "BadRequestError"), error.status_code)
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")


async def _our_bug(request: Request, error: Exception) -> Response:
    """The details go to the log, by way of the server."""
    return Response(INTERNAL, 500, media_type="application/json")
