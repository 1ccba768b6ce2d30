"""/v1/load_lora_adapter and /v1/unload_lora_adapter, with the bodies and answers of vLLM."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.engine.adapters import LoRARequest, already_loaded, not_found
from octavo.errors import InvalidRequest, NotSupported
from octavo.server.serving import Serving
from octavo.wire.requests import LoadAdapterRequest, UnloadAdapterRequest


class InvalidUserInput(InvalidRequest):
    kind = "InvalidUserInput"


class AdaptersOff(NotSupported):
    status, kind = 404, "NotFoundError"


async def off(serving: Serving, request: Request) -> Response:
    """In place of the two others without --enable-lora: clients may not name folders to read then."""
    raise AdaptersOff(f"{request.url.path}: adapters are off", fix="start with --enable-lora")


async def load(serving: Serving, request: Request) -> Response:
    asked = await serving.read(request, LoadAdapterRequest)
    if not asked.lora_name or not asked.lora_path:
        raise InvalidUserInput("Both 'lora_name' and 'lora_path' must be provided.")
    if asked.lora_name in serving.llm.adapters and not asked.load_inplace:
        raise InvalidUserInput(already_loaded(asked.lora_name).cause, param="lora_name")
    await serving.llm.add_lora(LoRARequest(asked.lora_name, 1, asked.lora_path, asked.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


async def unload(serving: Serving, request: Request) -> Response:
    asked = await serving.read(request, UnloadAdapterRequest)
    if not asked.lora_name:
        raise InvalidUserInput("'lora_name' needs to be provided to unload a LoRA adapter.")
    if asked.lora_name not in serving.llm.adapters:
        raise not_found(asked.lora_name, serving.llm.adapters)
    await serving.llm.remove_lora(asked.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")
