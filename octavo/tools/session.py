"""The engine for a program that reads a terminal: the event loop runs in a thread, answers come as an iterator."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from octavo.config import EngineArgs
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.outputs import ChoiceDelta
from octavo.engine.types import SamplingParams
from octavo.errors import InvalidRequest, OctavoError
from octavo.server.progress import LoadingBar

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]


@dataclass
class Answer:
    """One answer as far as it has come, and how fast it came."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    started: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    last_token: float = 0.0

    def add(self, delta: ChoiceDelta, now: float) -> None:
        if delta.token_ids:
            self.last_token = now
            self.first_token = self.first_token or self.last_token
            self.completion_tokens += len(delta.token_ids)
        self.text += delta.text
        self.finish_reason = delta.finish_reason

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first, whose time is the prompt's; None with fewer than two."""
        seconds = self.last_token - self.first_token
        return (self.completion_tokens - 1) / seconds if seconds > 0 else None

    @property
    def first_token_s(self) -> float | None:
        return self.first_token - self.started if self.first_token else None

    def summary(self) -> str:
        parts = [f"{self.completion_tokens} token{'' if self.completion_tokens == 1 else 's'}"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.first_token_s is not None:
            parts.append(f"first after {self.first_token_s:.2f} s")
        if self.finish_reason == "length":
            parts.append("cut off at max_tokens or the end of the context")
        return ", ".join(parts)


class Session:
    """An engine that is up while the `with` block runs. Raises what `AsyncLLM.create` raises."""

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event loop", daemon=True)

    def __enter__(self) -> Session:
        self._thread.start()
        try:
            with LoadingBar() as bar:
                self.llm = self._result(AsyncLLM.create(self.args, bar.update))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._result(self.llm.shutdown())
        finally:
            self._stop()

    def check_sampling(self, params: SamplingParams) -> None:
        """Raises InvalidRequest for what could be right with no prompt at all."""
        params.verify(self.llm.config.vocab_size, self.args.max_logprobs)
        if params.max_tokens is not None and params.max_tokens >= self.llm.max_model_len:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens}", limit=f"{self.llm.max_model_len} tokens of context",
                fix="lower max_tokens", param="max_tokens",
            )  # fmt: skip

    def stream(self, messages: Messages, params: SamplingParams, answer: Answer, *, capped: bool) -> Iterator[str]:
        """Pieces of the answer to a conversation; `answer` is filled in meanwhile.

        `capped`: a `max_tokens` that does not fit after the conversation is lowered and not refused.
        Leaving the iterator early ends the answer in the engine. Raises InvalidRequest, EngineDead, Overloaded.
        """
        news: queue.SimpleQueue[tuple[ChoiceDelta, float] | BaseException | None] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._pump(messages, params, answer, capped, news.put), self._loop)
        try:
            while (item := news.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                answer.add(*item)
                yield item[0].text
        finally:
            work.cancel()
            with suppress(CancelledError, OctavoError):
                work.result()

    async def _pump(self, messages: Messages, params: SamplingParams, answer: Answer, capped: bool, put: Any) -> None:
        try:
            token_ids = await self._tokens(messages)
            answer.prompt_tokens = len(token_ids)
            params = await self.llm.check(token_ids, params, capped=capped)
            async with aclosing(self.llm.stream(token_ids, params)) as batches:
                async for deltas in batches:
                    now = time.perf_counter()
                    for delta in deltas:
                        put((delta, now))
        except Exception as error:
            put(error)
        finally:
            put(None)

    async def _tokens(self, messages: Messages) -> list[int]:
        """As the model's chat template has it; a model without one continues the last message."""
        if self.llm.template is None:
            return await self.llm.encode(messages[-1]["content"])
        return (await self.llm.render(messages))[1]

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            with suppress(CancelledError, OctavoError):
                future.result()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
