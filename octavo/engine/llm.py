"""The engine for plain scripts: `LLM(model="smollm2").generate(["Hello"])`. No torch here."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from types import TracebackType
from typing import Any, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.config import EngineArgs
from octavo.engine.adapters import LoRARequest
from octavo.engine.async_llm import AsyncLLM, Prompt
from octavo.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_output
from octavo.engine.client import raise_if_forked
from octavo.engine.outputs import ChoiceDelta, OutputBuilder, RequestOutput
from octavo.engine.types import SamplingParams
from octavo.errors import InvalidRequest, UsageError

T = TypeVar("T")
MAX_OPEN_REQUESTS = 512
"""requests in the engine at once; more would only wait there"""
CLOSE_TIMEOUT_S = 30.0
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
LoRA = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """Loads a model and answers lists of prompts; keyword names are vLLM's.

    The engine ends with `close`, with a `with` block, with the object's last reference or with the program.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        """`settings` are the fields of `EngineArgs`. Raises UsageError and what `AsyncLLM.create` raises."""
        args = _engine_args(model, settings)
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="octavo-llm", daemon=True)
        self._thread.start()
        self._finalizer: weakref.finalize[..., LLM] = weakref.finalize(self, _stop_loop, self._loop, self._thread)
        try:
            self._llm: AsyncLLM = self._wait(AsyncLLM.create(args))
        except BaseException:
            self.close()
            raise
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close, self._llm, self._loop, self._thread)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True,
        lora_request: LoRA = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """One output a prompt, in their order. `use_tqdm` shows a progress bar on a terminal.

        `lora_request`, one for all prompts or one for each, names adapters, which are loaded at first use. Raises
        InvalidRequest, before anything is generated, for a prompt or parameter that cannot be served, and what
        `AsyncLLM.add_lora` raises.
        """
        return self._wait(self._generate(_listed(prompts), sampling_params, use_tqdm, lora_request))

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, lora_request: LoRA = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:  # fmt: skip
        """The likeliest answers that a search with `params.beam_width` beams finds. Raises as `generate` does."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(
                f"params is a {type(params).__name__}", fix="make it with BeamSearchParams(…)", param="params"
            )

        async def answer() -> list[BeamSearchOutput]:
            sampling = params.sampling(self._llm.args.max_logprobs)
            outputs = await self._generate(_listed(prompts), sampling, use_tqdm, lora_request)
            texts = [o.prompt or await self._llm.decode(o.prompt_token_ids, True) for o in outputs]
            return [beam_output(o, text, params) for o, text in zip(outputs, texts, strict=True)]

        return self._wait(answer())

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: Params = None,
        use_tqdm: bool = True, add_generation_prompt: bool = True, continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None, lora_request: LoRA = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answers one conversation or several. Raises TemplateError and what `generate` raises."""
        several: Sequence[Any] = [messages] if _holds_messages(messages) else messages
        if not (isinstance(several, (list, tuple)) and all(_holds_messages(one) for one in several)):
            raise InvalidRequest(
                f"messages is {_kind(messages)}", limit="a list of messages, or of such lists", fix="give one",
                param="messages",
            )  # fmt: skip

        async def answer() -> list[RequestOutput]:
            prompts = []
            for conversation, params in zip(several, self._params_for(len(several), sampling_params), strict=True):
                text, ids = await self._llm.render(
                    conversation, add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message, template_kwargs=chat_template_kwargs, params=params,
                )  # fmt: skip
                prompts.append({"prompt": text, "prompt_token_ids": ids})
            return await self._generate(prompts, sampling_params, use_tqdm, lora_request)

        return self._wait(answer())

    def remove_lora(self, name: str) -> None:
        """Unloads an adapter. Raises ModelNotFound."""
        self._wait(self._llm.remove_lora(name))

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self._llm.default_params)

    def close(self) -> None:
        """Ends the engine. Again is harmless."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, done on our own loop; Ctrl-C cancels it, and with it its requests."""
        try:
            raise_if_forked(self._pid)
            if not self._finalizer.alive:
                raise UsageError("this LLM is closed", fix="make a new one")
        except UsageError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _generate(
        self, prompts: Sequence[Prompt], sampling_params: Params, use_tqdm: bool, lora_request: LoRA
    ) -> list[RequestOutput]:
        llm = self._llm
        checked = []
        adapters = _adapters_for(len(prompts), lora_request)
        every_params = self._params_for(len(prompts), sampling_params)
        for prompt, params, adapter in zip(prompts, every_params, adapters, strict=True):
            text, ids = await llm.tokenized(prompt, params)
            params = await llm.check(ids, params)
            checked.append((text, ids, params, None if adapter is None else adapter.lora_name))
        for adapter in dict.fromkeys(filter(None, adapters)):
            await llm.add_lora(adapter)
        places = asyncio.Semaphore(MAX_OPEN_REQUESTS)
        with _Bar(len(checked), use_tqdm) as bar:

            async def answer(
                text: str | None, ids: list[int], params: SamplingParams, adapter: str | None
            ) -> RequestOutput:
                async with places:
                    return await _answer(llm, text, ids, params, adapter, bar.count)

            tasks = [asyncio.ensure_future(answer(*one)) for one in checked]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _params_for(self, count: int, params: Params) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        return _one_for_each(count, params, SamplingParams, "sampling_params")


def _adapters_for(count: int, asked: LoRA) -> Sequence[LoRARequest | None]:
    return [None] * count if asked is None else _one_for_each(count, asked, LoRARequest, "lora_request", may_lack=True)


def _one_for_each(count: int, asked: Any, kind: type[T], name: str, may_lack: bool = False) -> Sequence[Any]:
    """One value for each of `count` prompts, from one for all or a list, in which with `may_lack` None may stand.

    Raises InvalidRequest.
    """
    if isinstance(asked, kind):
        return [asked] * count
    listed = isinstance(asked, (list, tuple))
    if not listed or not all(isinstance(one, kind) or (may_lack and one is None) for one in asked):
        raise InvalidRequest(
            f"{name} is {_kind(asked)}", limit=f"{kind.__name__}, or a list of them",
            fix=f"make it with {kind.__name__}(…)", param=name,
        )  # fmt: skip
    if len(asked) != count:
        raise InvalidRequest(
            f"there are {count} prompts and {len(asked)} {name.removesuffix('s')}s",
            limit="one for all or one for each", fix="make the lists equally long", param=name,
        )  # fmt: skip
    return cast("Sequence[Any]", asked)


async def _answer(
    llm: AsyncLLM, text: str | None, ids: list[int], params: SamplingParams, adapter: str | None,
    count: Callable[[list[ChoiceDelta]], None],
) -> RequestOutput:  # fmt: skip
    request_id = llm.new_id()
    builder = OutputBuilder(request_id, text, ids, params, llm.token_text)
    async with aclosing(llm.stream(ids, params, request_id=request_id, adapter=adapter)) as stream:
        async for deltas in stream:
            builder.add(deltas)
            count(deltas)
    count([])
    return builder.output


class _Bar:
    """Prompts done and tokens a second, on a terminal only."""

    def __init__(self, total: int, wanted: bool) -> None:
        self.bar: Progress | None = None
        self.tokens = 0
        if wanted and sys.stderr is not None and sys.stderr.isatty():
            rate = TextColumn("{task.fields[rate]}")
            columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), rate)
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("prompts", total=total, rate="")

    def count(self, deltas: list[ChoiceDelta]) -> None:
        """No deltas: a prompt is done."""
        self.tokens += sum(len(delta.token_ids) for delta in deltas)
        if self.bar is not None:
            elapsed = self.bar.tasks[0].elapsed or 1e-9
            self.bar.update(self.task, advance=0 if deltas else 1, rate=f"{self.tokens / elapsed:.1f} tokens/s")

    def __enter__(self) -> _Bar:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()


def _engine_args(model: str, settings: Mapping[str, Any]) -> EngineArgs:
    known = {f.name for f in fields(EngineArgs)} - {"model"}
    for name in settings:
        if name not in known:
            raise UsageError(
                f"LLM has no setting {name!r}", limit=", ".join(sorted(known)), fix="leave it out", param=name
            )
    given = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in settings.items()}
    names = given.pop("served_model_name", None) or ()
    served = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, list) else names
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    args = EngineArgs(name, served_model_name=served, **given)
    args.verify()
    return args


def _holds_messages(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def _kind(value: object) -> str:
    return f"a list with {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A lone text, dict or list of token ids is one prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or (prompts and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(CLOSE_TIMEOUT_S)


def _close(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if thread.is_alive():
        asyncio.run_coroutine_threadsafe(llm.shutdown(), loop).result(CLOSE_TIMEOUT_S)
        _stop_loop(loop, thread)
