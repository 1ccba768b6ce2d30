"""What all handlers share: the engine front, whether we still take requests, and how a request becomes deltas."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.requests import Request

from octavo.config import ServerArgs
from octavo.engine.adapters import unknown_model
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.outputs import ChoiceDelta
from octavo.engine.types import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from octavo.errors import InvalidRequest, Overloaded
from octavo.server.metrics import Metrics
from octavo.server.middleware import REQUEST_ID
from octavo.server.stream import merged
from octavo.wire.requests import AnyRequest, SamplingFields, read
from octavo.wire.responses import PromptTokensDetails, Usage
from octavo.wire.structured import structure_of

log = logging.getLogger("octavo.server")
PARSE_IN_THREAD_BYTES = 64 << 10
SAMPLING_NAMES = (
    "n", "best_of", "use_beam_search", "length_penalty",
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "thinking_token_budget", "logprob_token_ids",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side",
    "stream_interval",
)  # fmt: skip


class Serving:
    """State of one server. `draining` is set by the launcher at the first signal."""

    def __init__(self, llm: AsyncLLM, args: ServerArgs) -> None:
        self.llm, self.args = llm, args
        self.metrics = Metrics(
            llm.model_names[0], llm.config.max_model_len, lambda: llm.stats, lambda: llm.facts,
            llm.config.max_loras if llm.config.enable_lora else None,
        )  # fmt: skip
        self.started = int(time.time())
        self.draining = False
        self.open_requests = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._numbers = itertools.count()

    def admit(self) -> None:
        """Counts a request as open until `release`. Raises Overloaded while draining."""
        if self.draining:
            raise Overloaded("the server is shutting down", retry_after_s=10, fix="send the request elsewhere")
        self.open_requests += 1
        self.idle.clear()

    def release(self) -> None:
        self.open_requests -= 1
        if not self.open_requests:
            self.idle.set()

    async def read(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        """The body as a checked request; long ones are parsed beside the event loop."""
        body = await json_body(request)
        if len(body) > PARSE_IN_THREAD_BYTES:
            parsed, unknown = await asyncio.to_thread(read, kind, body)
        else:
            parsed, unknown = read(kind, body)
        for name in unknown:
            if self.metrics.unknown_field(name):
                log.warning("request field %.80r is unknown and ignored", name)
        self.check_model(getattr(parsed, "model", None))
        return parsed

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound, in vLLM's words, for what is neither a model that is served here nor an adapter."""
        if name is not None and name not in self.llm.model_names and name not in self.llm.adapters:
            raise unknown_model(name, (*self.llm.model_names, *self.llm.adapters))

    def visible_id(self, request: Request, asked: SamplingFields, prefix: str) -> str:
        given = asked.request_id
        if given is not None and not REQUEST_ID.fullmatch(given):
            raise InvalidRequest(
                "request_id holds other characters", limit="1 to 128 of A-Z a-z 0-9 . _ : -",
                fix="choose another", param="request_id",
            )  # fmt: skip
        return f"{prefix}-{given or request.state.request_id}"

    def params(
        self, asked: SamplingFields, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """The request's own values over the model's defaults. Raises InvalidRequest."""
        values = dict(self.llm.default_params)
        if asked.use_beam_search:  # it looks at none of the others, and refuses some
            values = {name: value for name, value in values.items() if name == "max_tokens"}
        values.update({k: v for k in SAMPLING_NAMES if (v := getattr(asked, k)) is not None})
        if asked.repetition_detection is not None:
            values["repetition_detection"] = RepetitionDetectionParams(**asked.repetition_detection.model_dump())
        if (structure := structure_of(asked)) is not None:
            values["structured_outputs"] = StructuredOutputsParams(**structure)
        values["max_tokens"] = max_tokens if max_tokens is not None else values.get("max_tokens")
        logprobs = None if asked.logprob_token_ids is not None else logprobs
        return SamplingParams(**values, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def open(
        self, visible_id: str, prompts: Sequence[Prompt], asked: SamplingFields | None
    ) -> aclosing[AsyncGenerator[tuple[int, list[ChoiceDelta]], None]]:
        """(prompt index, deltas) of all prompts; a context manager, whose end aborts what still runs.

        `asked` says, among others, by its `model` which adapter computes them.
        """
        model = asked.model if asked else None
        adapter = None if model in self.llm.model_names else model
        streams = []
        for prompt in prompts:
            engine_id = f"{visible_id}-{next(self._numbers)}"
            if self.args.log_requests:
                log.info("request %s: %d prompt tokens, %.2000s", engine_id, len(prompt.token_ids), prompt.params)
            stream = self.llm.stream(
                prompt.token_ids, prompt.params, request_id=engine_id, cache_salt=asked.cache_salt if asked else None,
                priority=(asked.priority or 0) if asked else 0, adapter=adapter,
            )  # fmt: skip
            timing = self.llm.timing_of(engine_id)
            streams.append(self.metrics.observed(stream, len(prompt.token_ids), prompt.params, timing))
        return aclosing(merged(streams))


async def json_body(request: Request) -> bytes:
    """Raises NotJson for a body of another type, or of none: any web page may send such a one without asking first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise NotJson(kind)
    return await request.body()


class NotJson(InvalidRequest):
    status, kind = 415, "UnsupportedMediaTypeError"

    def __init__(self, kind: str) -> None:
        shown = f"Content-Type is {kind[:60]}" if kind else "Content-Type is missing"
        super().__init__(shown, limit="application/json", fix="send the header Content-Type: application/json")


@dataclass
class Prompt:
    """One checked prompt of a request."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams


class Spent:
    """Counts what a request's `usage` tells: prompt tokens once, not once a choice."""

    def __init__(self, args: ServerArgs) -> None:
        self._cached: int | None = 0 if args.enable_prompt_tokens_details else None

    def note(self, delta: ChoiceDelta) -> None:
        if self._cached is not None and delta.index == 0:
            self._cached += delta.cached_tokens

    def usage(self, prompt_tokens: int, completion_tokens: int) -> Usage:
        details = None if self._cached is None else PromptTokensDetails(self._cached)
        return Usage(prompt_tokens, prompt_tokens + completion_tokens, completion_tokens, details)


@dataclass
class Choice:
    """One whole choice, put together from its deltas."""

    token_ids: list[int] = field(default_factory=list)
    deltas: list[ChoiceDelta] = field(default_factory=list)

    def add(self, delta: ChoiceDelta) -> None:
        self.deltas.append(delta)
        self.token_ids += delta.token_ids

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def last(self) -> ChoiceDelta:
        return self.deltas[-1]
