"""Logprobs in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.engine.types import TokenLogprobs
from octavo.wire.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptLogprobs, TopLogprob

LOWEST = -9999.0
"""JSON has no minus infinity; vLLM writes this instead"""


class Vocabulary(Protocol):
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class Names:
    """How tokens are called in answers: by their text, or as "token_id:N" where the client asked for that."""

    def __init__(self, vocabulary: Vocabulary, as_ids: bool) -> None:
        self.vocabulary, self.as_ids = vocabulary, as_ids

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.vocabulary.token_text(token_id)

    def top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(self.text(token_id), finite(logprob), list(self.vocabulary.token_bytes(token_id)))


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(positions: Sequence[TokenLogprobs], names: Names, listed: bool = False) -> ChatLogprobs:
    """The chosen token stands beside the best ones, and also at the head of those that the client `listed`."""
    content = []
    for position in positions:
        every = list(zip(position.token_ids, position.logprobs, strict=True))
        own = names.top(*every[0])
        others = dict(every) if listed else dict(every[1:])
        best = [names.top(token_id, logprob) for token_id, logprob in others.items()]
        content.append(ChatTokenLogprob(own.token, own.logprob, own.bytes, best))
    return ChatLogprobs(content)


def completion_logprobs(
    token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None], offset: int, names: Names
) -> CompletionLogprobs:
    """`offset` is where the first token's text begins in the answer, in characters."""
    result = CompletionLogprobs([], [], [], [])
    for token_id, position in zip(token_ids, positions, strict=True):
        text = names.text(token_id)
        result.text_offset.append(offset)
        result.tokens.append(text)
        offset += len(text)
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(finite(position.logprobs[0]))
        ranked = zip(position.token_ids, position.logprobs, strict=True)
        result.top_logprobs.append({names.text(i): finite(v) for i, v in ranked})
    return result


def prompt_logprobs(positions: Sequence[TokenLogprobs | None], names: Names) -> PromptLogprobs:
    return [None if position is None else _ranked(position, names) for position in positions]


def _ranked(position: TokenLogprobs, names: Names) -> dict[int, dict[str, object]]:
    ranks = [position.rank, *range(1, len(position.token_ids))]
    entries: dict[int, dict[str, object]] = {}
    for token_id, logprob, rank in zip(position.token_ids, position.logprobs, ranks, strict=True):
        entries.setdefault(token_id, {"logprob": finite(logprob), "rank": rank, "decoded_token": names.text(token_id)})
    return entries
