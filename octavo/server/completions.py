"""/v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.outputs import ChoiceDelta
from octavo.engine.types import TokenLogprobs
from octavo.errors import InvalidRequest
from octavo.server.logprobs import Names, completion_logprobs, prompt_logprobs
from octavo.server.serving import Choice, Prompt, Serving, Spent
from octavo.server.stream import EventStream, until_gone
from octavo.wire.requests import CompletionRequest
from octavo.wire.responses import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    Usage,
    encode,
    frame,
)
from octavo.wire.structured import structure_names

DEFAULT_MAX_TOKENS = 16


async def completions(serving: Serving, request: Request) -> Response:
    asked = await serving.read(request, CompletionRequest)
    asked.check()
    visible_id = serving.visible_id(request, asked, "cmpl")
    call = CompletionCall(serving, asked, visible_id, await until_gone(request, _prompts(serving, asked)))
    if asked.stream:
        return await EventStream.begun(request, call.frames())
    return Response(encode(await until_gone(request, call.answer())), media_type="application/json")


async def _prompts(serving: Serving, asked: CompletionRequest) -> list[Prompt]:
    prompts = []
    for prompt in asked.prompts():
        prompts.append(await _prompt(serving, asked, prompt))
        await asyncio.sleep(0)  # many short prompts must not hold up the streams either
    return prompts


async def _prompt(serving: Serving, asked: CompletionRequest, prompt: str | list[int]) -> Prompt:
    if asked.use_beam_search and asked.echo and asked.logprobs is not None:
        raise InvalidRequest("echo with logprobs does not go with use_beam_search", fix="leave one out", param="echo")
    default = serving.llm.default_params.get("max_tokens", DEFAULT_MAX_TOKENS)
    max_tokens = default if asked.max_tokens is None else asked.max_tokens
    params = serving.params(
        asked, max_tokens=1 if _only_echo(asked) else max_tokens, logprobs=asked.logprobs,
        prompt_logprobs=asked.logprobs if asked.echo and asked.logprobs is not None else asked.prompt_logprobs,
    )  # fmt: skip
    text, ids = await serving.llm.tokenized(prompt, params, asked.add_special_tokens)
    checked = await serving.llm.check(ids, params, capped=asked.max_tokens is None, names=structure_names(asked))
    if asked.echo and (text is None or params.truncate_prompt_tokens is not None):
        text = await serving.llm.decode(ids)
    return Prompt(text, ids, checked)


def _only_echo(asked: CompletionRequest) -> bool:
    """Whether only the prompt's own logprobs are wanted; a token is generated all the same, and not shown."""
    if asked.max_tokens == 0 and not asked.echo:
        raise InvalidRequest(
            "max_tokens is 0", limit="at least 1, or 0 with echo", fix="raise max_tokens", param="max_tokens"
        )
    return asked.max_tokens == 0


class CompletionCall:
    """One request on its way to its answer or its stream. Choice c of prompt p has index p * n + c."""

    def __init__(self, serving: Serving, asked: CompletionRequest, visible_id: str, prompts: list[Prompt]) -> None:
        self.serving, self.asked, self.id, self.prompts = serving, asked, visible_id, prompts
        self.model = serving.llm.model_names[0] if asked.model is None else asked.model
        self.names = Names(serving.llm, bool(asked.return_tokens_as_token_ids))
        self.created = int(time.time())
        self.spent = Spent(serving.args)
        self.n = prompts[0].params.n
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.only_echo = _only_echo(asked)

    async def answer(self) -> Completion:
        choices = [Choice() for _ in range(self.n * len(self.prompts))]
        async with self.serving.open(self.id, self.prompts, self.asked) as merged:
            async for p, deltas in merged:
                for delta in deltas:
                    self.spent.note(delta)
                    choices[p * self.n + delta.index].add(self._shown(delta))
        return Completion(
            id=self.id, created=self.created, model=self.model,
            choices=[self._choice(i, choices) for i in range(len(choices))],
            usage=self.spent.usage(self.prompt_tokens, sum(len(c.token_ids) for c in choices)),
        )  # fmt: skip

    def _shown(self, delta: ChoiceDelta) -> ChoiceDelta:
        if self.only_echo:
            delta.text, delta.token_ids, delta.logprobs = "", [], None
        return delta

    def _choice(self, index: int, choices: list[Choice]) -> CompletionChoice:
        choice, prompt = choices[index], self.prompts[index // self.n]
        mine = choices[index // self.n * self.n : (index // self.n + 1) * self.n]
        shown = next((d.prompt_logprobs for c in mine for d in c.deltas if d.prompt_logprobs is not None), None)
        positions = [position for delta in choice.deltas for position in delta.logprobs or ()]
        return CompletionChoice(
            index=index, text=(prompt.text or "" if self.asked.echo else "") + choice.text,
            logprobs=self._logprobs(choice.token_ids, positions, 0, (prompt.token_ids, shown)),
            finish_reason=choice.last.finish_reason, stop_reason=choice.last.stop_reason,
            token_ids=choice.token_ids if self.asked.return_token_ids else None,
            prompt_logprobs=None if shown is None else prompt_logprobs(shown, self.names),
            prompt_token_ids=prompt.token_ids if self.asked.return_token_ids else None,
        )  # fmt: skip

    def _logprobs(
        self, token_ids: list[int], positions: Sequence[TokenLogprobs], offset: int,
        echoed: tuple[list[int], Sequence[TokenLogprobs | None] | None] | None,
    ) -> CompletionLogprobs | None:  # fmt: skip
        """Of the prompt too, when it is echoed and stands before these tokens."""
        if self.asked.logprobs is None:
            return None
        every: list[TokenLogprobs | None] = list(positions)
        if self.asked.echo and echoed is not None and echoed[1] is not None:
            token_ids, every = [*echoed[0], *token_ids], [*echoed[1], *every]
        return completion_logprobs(token_ids, every, offset, self.names)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        counts = [0] * (self.n * len(self.prompts))
        offsets = [0] * len(counts)
        echoed: dict[int, Sequence[TokenLogprobs | None] | None] = {}
        begun: set[int] = set()
        async with self.serving.open(self.id, self.prompts, self.asked) as merged:
            async for p, deltas in merged:
                out = []
                for delta in map(self._shown, deltas):
                    index = p * self.n + delta.index
                    counts[index] += len(delta.token_ids)
                    self.spent.note(delta)
                    echoed[p] = delta.prompt_logprobs or echoed.get(p)
                    first = index not in begun
                    begun.add(index)
                    if first or delta.text or delta.token_ids or delta.finish_reason is not None:
                        chunk, length = self._chunk(
                            index, delta, offsets[index], echoed.get(p) if first else None, first
                        )
                        offsets[index] += length
                        out.append(self._frame([chunk], self._running_usage(p, counts[index])))
                if out:
                    yield b"".join(out)
        if self.asked.include_usage:
            yield self._frame([], self.spent.usage(self.prompt_tokens, sum(counts)))

    def _chunk(
        self, index: int, delta: ChoiceDelta, offset: int, echoed: Sequence[TokenLogprobs | None] | None, first: bool
    ) -> tuple[CompletionChunkChoice, int]:
        """The chunk, and how many characters its tokens' texts take."""
        prompt = self.prompts[index // self.n]
        text = (prompt.text or "" if first and self.asked.echo else "") + delta.text
        logprobs = self._logprobs(delta.token_ids, delta.logprobs or (), offset, (prompt.token_ids, echoed))
        choice = CompletionChunkChoice(
            index, text, logprobs, delta.finish_reason,
            delta.stop_reason if delta.finish_reason is not None else UNSET,
            delta.token_ids if self.asked.return_token_ids else UNSET,
            prompt.token_ids if first and self.asked.return_token_ids else UNSET,
        )  # fmt: skip
        return choice, sum(map(len, logprobs.tokens)) if logprobs else 0

    def _running_usage(self, prompt_index: int, count: int) -> Usage | None:
        if not self.asked.continuous_usage:
            return None
        return self.spent.usage(len(self.prompts[prompt_index].token_ids), count)

    def _frame(self, choices: list[CompletionChunkChoice], tokens: Usage | None) -> bytes:
        chunk = CompletionChunk(self.id, self.created, self.model, choices, usage=UNSET if tokens is None else tokens)
        return frame(encode(chunk))
