"""What clients get: OpenAI's objects with vLLM's additions, as msgspec structs that encode straight to JSON.

A whole answer carries its nulls as vLLM's does; in a stream chunk, `UNSET` fields do not appear at all.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType

StopReason = int | str | None


class PromptTokensDetails(Struct):
    cached_tokens: int
    created_cache_tokens: None = None
    multimodal_tokens: None = None


class Usage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]


class ChatMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None


PromptLogprobs = list[dict[int, dict[str, object]] | None]


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: StopReason = None
    token_ids: list[int] | None = None


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    service_tier: None = None
    system_fingerprint: None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """One entry a token; the first token of an echoed prompt has no logprob."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: StopReason = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"
    service_tier: None = None
    system_fingerprint: None = None


class CompletionChunkChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType = UNSET


class ModelPermission(Struct):
    id: str
    created: int
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    permission: list[ModelPermission]
    object: str = "model"
    owned_by: str = "octavo"
    parent: str | None = None
    """of an adapter, the model that it belongs to"""


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def frame(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"
