"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.outputs import ChoiceDelta
from octavo.server.logprobs import Names, chat_logprobs, prompt_logprobs
from octavo.server.serving import Choice, Prompt, Serving, Spent
from octavo.server.stream import EventStream, until_gone
from octavo.wire.requests import ChatRequest, plain_messages
from octavo.wire.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Delta,
    Usage,
    encode,
    frame,
)
from octavo.wire.structured import structure_names


async def chat_completions(serving: Serving, request: Request) -> Response:
    asked = await serving.read(request, ChatRequest)
    asked.check()
    visible_id = serving.visible_id(request, asked, "chatcmpl")
    call = ChatCall(serving, asked, visible_id, await until_gone(request, _prompt(serving, asked)))
    if asked.stream:
        return await EventStream.begun(request, call.frames())
    return Response(encode(await until_gone(request, call.answer())), media_type="application/json")


async def _prompt(serving: Serving, asked: ChatRequest) -> Prompt:
    name, limit = asked.token_limit
    params = serving.params(
        asked, max_tokens=limit, logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        prompt_logprobs=asked.prompt_logprobs,
    )  # fmt: skip
    text, ids = await serving.llm.render(
        plain_messages(asked.messages),
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        add_special_tokens=asked.add_special_tokens,
        template_kwargs=asked.chat_template_kwargs,
        params=params,
    )
    names = {"max_tokens": name, "logprobs": "top_logprobs", **structure_names(asked)}
    checked = await serving.llm.check(ids, params, prompt_name="messages", capped=limit is None, names=names)
    return Prompt(text, ids, checked)


class ChatCall:
    """One request on its way to its answer or its stream."""

    def __init__(self, serving: Serving, asked: ChatRequest, visible_id: str, prompt: Prompt) -> None:
        self.serving, self.asked, self.id, self.prompt = serving, asked, visible_id, prompt
        self.model = serving.llm.model_names[0] if asked.model is None else asked.model
        self.names = Names(serving.llm, bool(asked.return_tokens_as_token_ids))
        self.created = int(time.time())
        self.spent = Spent(serving.args)

    async def answer(self) -> ChatCompletion:
        choices = [Choice() for _ in range(self.prompt.params.n)]
        async with self.serving.open(self.id, [self.prompt], self.asked) as merged:
            async for _, deltas in merged:
                for delta in deltas:
                    choices[delta.index].add(delta)
                    self.spent.note(delta)
        ids = self.prompt.token_ids
        shown = next((d.prompt_logprobs for c in choices for d in c.deltas if d.prompt_logprobs is not None), None)
        return ChatCompletion(
            id=self.id, created=self.created, model=self.model,
            choices=[self._choice(i, choice) for i, choice in enumerate(choices)],
            usage=self.spent.usage(len(ids), sum(len(c.token_ids) for c in choices)),
            prompt_logprobs=None if shown is None else prompt_logprobs(shown, self.names),
            prompt_token_ids=ids if self.asked.return_token_ids else None,
        )  # fmt: skip

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        content = [entry for delta in choice.deltas if (part := self._logprobs(delta)) for entry in part.content]
        return ChatChoice(
            index=index, message=ChatMessage(choice.text),
            logprobs=ChatLogprobs(content) if self.asked.logprobs else None,
            finish_reason=choice.last.finish_reason, stop_reason=choice.last.stop_reason,
            token_ids=choice.token_ids if self.asked.return_token_ids else None,
        )  # fmt: skip

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        if not self.asked.logprobs or not delta.logprobs:
            return None
        return chat_logprobs(delta.logprobs, self.names, listed=self.asked.logprob_token_ids is not None)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        counts = [0] * self.prompt.params.n
        started = False
        async with self.serving.open(self.id, [self.prompt], self.asked) as merged:
            async for _, deltas in merged:
                out = [] if started else [self._first(i) for i in range(len(counts))]
                started = True
                for delta in deltas:
                    counts[delta.index] += len(delta.token_ids)
                    self.spent.note(delta)
                    if self._tells(delta):
                        out.append(self._chunk(delta, counts[delta.index]))
                if out:
                    yield b"".join(out)
        if self.asked.include_usage:
            yield self._frame([], self.spent.usage(len(self.prompt.token_ids), sum(counts)))

    def _first(self, index: int) -> bytes:
        ids = self.prompt.token_ids if self.asked.return_token_ids else UNSET
        choice = ChatChunkChoice(index, Delta(role="assistant", content=""))
        return self._frame([choice], self._running_usage(0), ids)

    def _tells(self, delta: ChoiceDelta) -> bool:
        """Whether a client learns anything from it."""
        kept = self.asked.logprobs or self.asked.return_token_ids
        return bool(delta.text or delta.finish_reason is not None or (kept and delta.token_ids))

    def _chunk(self, delta: ChoiceDelta, count: int) -> bytes:
        choice = ChatChunkChoice(
            delta.index, Delta(content=delta.text), self._logprobs(delta), delta.finish_reason,
            delta.stop_reason if delta.finish_reason is not None else UNSET,
            delta.token_ids if self.asked.return_token_ids else UNSET,
        )  # fmt: skip
        return self._frame([choice], self._running_usage(count))

    def _running_usage(self, count: int) -> Usage | None:
        return self.spent.usage(len(self.prompt.token_ids), count) if self.asked.continuous_usage else None

    def _frame(self, choices: list[ChatChunkChoice], tokens: Usage | None, prompt_ids: object = UNSET) -> bytes:
        chunk = ChatChunk(self.id, self.created, self.model, choices, usage=UNSET if tokens is None else tokens)
        if prompt_ids is not UNSET:
            chunk.prompt_token_ids = self.prompt.token_ids
        return frame(encode(chunk))
