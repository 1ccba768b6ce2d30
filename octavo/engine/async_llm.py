"""The engine with text on both sides, for servers and programs that run an event loop. No torch here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from octavo.config import EngineArgs
from octavo.engine import admission
from octavo.engine.adapters import LoadedAdapter, LoRARequest
from octavo.engine.choice_text import ChoiceText
from octavo.engine.client import EngineClient
from octavo.engine.delta_streams import best_of, spaced
from octavo.engine.messages import EngineFacts, Stats
from octavo.engine.model_text import LoadedModel, OnProgress, in_daemon_thread, prepare
from octavo.engine.outputs import ChoiceDelta, OutputBuilder, RequestOutput
from octavo.engine.structured import Grammars
from octavo.engine.text_work import Cut, TextWork
from octavo.engine.types import Request, RequestOutputKind, SamplingParams
from octavo.errors import EngineDead, InvalidRequest, OctavoError, from_wire
from octavo.formats.text_file import as_path

log = logging.getLogger("octavo.engine")
Prompt = str | Sequence[int] | Mapping[str, Any]
"""a text, token ids, or vLLM's `{"prompt": text}` and `{"prompt_token_ids": ids}`"""


class AsyncLLM:
    """Text in, text out. Made by `create`; ended by `shutdown`."""

    def __init__(self, args: EngineArgs, model: LoadedModel, client: EngineClient, max_buffered_events: int) -> None:
        """For `create`."""
        self.args, self.config, self.tokenizer, self.template = args, model.config, model.tokenizer, model.template
        self.model_names = args.served_model_name or (args.model,)
        self.default_params = model.default_params
        self._client, self._max_buffered_events = client, max_buffered_events
        self._text_work = TextWork(model.tokenizer)
        self._grammars = Grammars(model.tokenizer, model.config.vocab_size, model.config.eos_token_ids)
        self._numbers = itertools.count()
        self._dead: asyncio.Future[OctavoError] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.ensure_future(self._keep_alive(args.engine_restarts))

    @classmethod
    async def create(
        cls, args: EngineArgs, on_progress: OnProgress | None = None, *, max_buffered_events: int = 4096
    ) -> AsyncLLM:
        """Finds the model, reads its header, and starts the engine; `on_progress` may be called from any thread.

        `max_buffered_events` are held for a caller who reads too slowly; past that its request ends with Overloaded.
        Raises ModelNotFound, BadModelFile, DeviceUnavailable, NotEnoughMemory or UsageError.
        """
        model = await in_daemon_thread(lambda: prepare(args, on_progress))
        client = await EngineClient.start(model.config, on_progress, max_buffered_events=max_buffered_events)
        return cls(args, model, client, max_buffered_events)

    async def _keep_alive(self, restarts: int) -> None:
        """Starts a dead engine again as often as was allowed; then says that it is dead."""
        while True:
            error = await self._client.died()
            await self._client.shutdown()
            while restarts:
                restarts -= 1
                log.error("%s; starting it again, restarts left: %d", error, restarts)
                try:
                    client = await EngineClient.start(self.config, max_buffered_events=self._max_buffered_events)
                    await _load_again(client, self._client.adapters)
                    self._client = client
                    break
                except (OctavoError, OSError) as err:
                    error = err if isinstance(err, OctavoError) else EngineDead(str(err))
            else:
                self._dead.set_result(error)
                return

    async def wait_dead(self) -> OctavoError:
        """Waits until the engine is dead for good, and returns why."""
        return await asyncio.shield(self._dead)

    # What is known of the model and the engine

    @property
    def facts(self) -> EngineFacts:
        return self._client.facts

    @property
    def stats(self) -> Stats:
        """As of the engine's latest message."""
        return self._client.stats

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together; the engine may have found room for fewer than the model has."""
        return self.facts.max_model_len

    # Adapters

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """Those that are loaded, by the name that requests ask for."""
        return self._client.adapters

    async def add_lora(self, asked: LoRARequest) -> None:
        """Loads an adapter; nothing happens where it is loaded already.

        Raises ModelNotFound, BadModelFile, NotEnoughMemory or InvalidRequest, which is for a name that is taken.
        """
        path = _absolute(asked.lora_path)
        if asked.lora_name in self.model_names:
            raise InvalidRequest(
                f"lora_name {asked.lora_name!r} is the model's own", fix="choose another name", param="lora_name"
            )
        loaded = self.adapters.get(asked.lora_name)
        if loaded is not None and loaded.path == path and not asked.load_inplace:
            return
        await self._client.load_adapter(asked.lora_name, path, asked.load_inplace)

    async def remove_lora(self, name: str) -> None:
        """Unloads an adapter; requests that run with it end as they would have. Raises ModelNotFound."""
        await self._client.unload_adapter(name)

    def timing_of(self, request_id: str) -> Callable[[], list[float] | None]:
        """Asks when an open request was queued and first scheduled, in seconds since the epoch; None before a token."""
        return lambda: self._client.timings.get(request_id)

    # Text and tokens

    async def encode(
        self, text: str, add_special_tokens: bool = True, params: SamplingParams | None = None
    ) -> list[int]:
        """Cut as `params` say. Raises InvalidRequest for a text that cannot fit into the context."""
        cut = None if params is None else self.cut_of(params)
        return await self._text_work.encode(text, add_special_tokens, self.max_model_len, "prompt", cut)

    def cut_of(self, params: SamplingParams) -> Cut | None:
        """How `params` shorten a prompt. Raises InvalidRequest."""
        return admission.cut_of(_typed(params), self.max_model_len)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Raises InvalidRequest for an id out of range."""
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        return self.tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)

    async def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, add_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None, params: SamplingParams | None = None,
    ) -> tuple[str, list[int]]:  # fmt: skip
        """A conversation as the model's template writes it, and its tokens, cut as `params` say.

        Raises TemplateError or InvalidRequest.
        """
        template = self.template
        if template is None:
            raise InvalidRequest("this model has no chat template", fix="start with --chat-template FILE")
        for name in ("messages", "add_generation_prompt", "continue_final_message"):
            if name in (template_kwargs or {}):
                raise InvalidRequest(
                    f"chat_template_kwargs holds {name}", fix=f"give {name} by itself", param="chat_template_kwargs"
                )

        def write() -> str:
            return template.render(
                messages, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, **(template_kwargs or {}),
            )  # fmt: skip

        cut = None if params is None else self.cut_of(params)
        return await self._text_work.render(write, messages, add_special_tokens, self.max_model_len, cut)

    # Generation

    async def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, prompt_name: str = "prompt",
        capped: bool = False, names: Mapping[str, str] | None = None,
    ) -> SamplingParams:  # fmt: skip
        """The parameters as they will be used, `max_tokens` filled in.

        `capped`: too large a `max_tokens` is lowered and not refused. `names` gives the caller's names for parameters.
        Raises InvalidRequest naming the parameter, its value and its limit; Overloaded for too many grammars at once.
        """
        try:
            params = _typed(params)
            params.verify(self.config.vocab_size, self.args.max_logprobs)
            admission.check_prompt(prompt_token_ids, self.config.vocab_size, self.max_model_len, prompt_name)
            count = len(prompt_token_ids)
            params = admission.fit_max_tokens(params, count, self.max_model_len, not capped)
            admission.check_logprobs(params, count, self.config.vocab_size)
            return await self._grammars.admit(admission.with_token_ids(params, self.tokenizer))
        except InvalidRequest as err:
            raise admission.renamed(err, names or {}) from None

    def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None,
        cache_salt: str | None = None, priority: int = 0, adapter: str | None = None,
    ) -> AsyncGenerator[list[ChoiceDelta], None]:  # fmt: skip
        """Deltas of all choices as they come; with `best_of`, of the best ones at the end. Closing it early aborts it.

        `params` are those that `check` returned; `adapter` is the name of one that is loaded. Raises, while iterating,
        Overloaded, EngineDead, or what the engine found.
        """
        request = Request(
            request_id=request_id or self.new_id(), prompt_token_ids=list(prompt_token_ids),
            sampling=admission.for_engine(params), arrival_time=time.time(), cache_salt=cache_salt, priority=priority,
            adapter=adapter,
        )  # fmt: skip
        stream = self._deltas(request)
        if params.num_choices > params.n and not params.use_beam_search:
            return best_of(stream, params.n, with_logprobs=params.num_logprobs(1) is not None)
        return stream if params.stream_interval in (None, 1) else spaced(stream, params.stream_interval or 1)

    async def _deltas(self, request: Request) -> AsyncGenerator[list[ChoiceDelta], None]:
        client, sampling = self._client, request.sampling
        choices = [ChoiceText(self.tokenizer, sampling, request.prompt_token_ids) for _ in range(sampling.n)]
        async with aclosing(client.generate(request)) as batches:
            async for events in batches:
                deltas = []
                for event in events:
                    if event.error is not None:
                        raise from_wire(event.error)
                    choice = choices[event.choice]
                    if choice.open:
                        deltas.append(choice.take(event))
                        if not choice.open and event.finish_reason is None:
                            client.abort(request.request_id, [event.choice])
                if deltas:
                    yield deltas
                if not any(choice.open for choice in choices):
                    return

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None,
        lora_request: LoRARequest | None = None, *, priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """The output as far as it has come, again and again, or as `output_kind` says; the last one is `finished`.

        Raises InvalidRequest; while iterating also Overloaded, EngineDead, or what the engine found.
        """
        params = SamplingParams(**self.default_params) if sampling_params is None else sampling_params
        text, ids = await self.tokenized(prompt, params)
        params = await self.check(ids, params)
        request_id = request_id or self.new_id()
        builder = OutputBuilder(request_id, text, ids, params, self.token_text)
        if lora_request is not None:
            await self.add_lora(lora_request)
        adapter = None if lora_request is None else lora_request.lora_name
        stream = self.stream(ids, params, request_id=request_id, priority=priority, adapter=adapter)
        async with aclosing(stream):
            async for deltas in stream:
                builder.add(deltas)
                if params.output_kind is RequestOutputKind.DELTA:
                    yield builder.take()
                elif params.output_kind is RequestOutputKind.CUMULATIVE or builder.output.finished:
                    yield builder.snapshot()

    async def tokenized(
        self, prompt: Prompt, params: SamplingParams, add_special_tokens: bool = True
    ) -> tuple[str | None, list[int]]:
        """A prompt's text, where it has one, and its token ids, cut as `params` say. Raises InvalidRequest."""
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        listed = list(ids) if isinstance(ids, Sequence) and not isinstance(ids, (str, bytes, bytearray)) else None
        if listed is not None and set(map(type, listed)) <= {int} and (text is None or isinstance(text, str)):
            cut = self.cut_of(params)
            return text, listed if cut is None else cut.of(listed)
        if not isinstance(text, str) or ids is not None:
            raise InvalidRequest(
                f"a prompt is a {type(prompt).__name__}", limit="text, token ids, or a dict with one of them",
                fix="give one of them", param="prompt",
            )  # fmt: skip
        return text, await self.encode(text, add_special_tokens, params)

    def new_id(self) -> str:
        return f"request-{next(self._numbers)}"

    async def abort(self, request_id: str) -> None:
        """Ends a request; one that is unknown or over is let be."""
        self._client.abort(request_id)

    async def check_health(self) -> None:
        """Returns within about a second, while the engine steps. Raises EngineDead."""
        await self._client.check_health()

    async def shutdown(self, drain: bool = False) -> None:
        """Ends the engine, after running requests when `drain`. Again is harmless."""
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        await self._client.shutdown(drain)
        self._text_work.close()
        self._grammars.close()


def _typed(params: SamplingParams) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"sampling_params is a {type(params).__name__}", fix="make it with SamplingParams(…)",
            param="sampling_params",
        )  # fmt: skip
    return admission.typed(params)


async def _load_again(client: EngineClient, adapters: Mapping[str, LoadedAdapter]) -> None:
    """The adapters that a dead engine had loaded, into the one that takes its place, as far as they are still there."""
    for name in client.adapters.keys() - adapters.keys():
        await client.unload_adapter(name)
    for adapter in adapters.values():
        try:
            if adapter.name not in client.adapters or client.adapters[adapter.name].path != adapter.path:
                await client.load_adapter(adapter.name, adapter.path, in_place=True)
        except OctavoError as err:
            log.error("adapter %s is lost: %s", adapter.name, err)


def _absolute(path: str) -> str:
    """Raises UsageError for what can be no path."""
    return os.path.abspath(as_path(path, "lora_path"))
