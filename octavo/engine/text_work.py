"""Text to tokens in an API process: short texts at once, long ones beside the event loop, hopeless ones not at all.

No torch. What runs in a pool and has not begun is dropped when its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from octavo.errors import InvalidRequest
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")
AT_ONCE_CHARACTERS = 2048
"""longer texts are worked on beside the event loop, so that no stream waits for them"""
LONG_CHARACTERS = 1 << 16
"""longer texts, of up to seconds each, have threads of their own, so that the others never wait for them"""
SHOWN_AT_LEAST = 4
"""of this many parts of a conversation a template surely shows one"""
LONG_AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 4))


class Cut(NamedTuple):
    """A prompt keeps at most so many tokens; the others go at one side, left or right."""

    keep: int
    side: str

    def of(self, token_ids: list[int], prefix: int = 0) -> list[int]:
        """The first `prefix` tokens, which begin every text, stay where there is room for more than them."""
        if len(token_ids) <= self.keep:
            return token_ids
        if self.side == "right":
            return token_ids[: self.keep]
        prefix = prefix if prefix < self.keep else 0
        return token_ids[:prefix] + token_ids[len(token_ids) - self.keep + prefix :]


class TextWork:
    """Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._long = ThreadPoolExecutor(LONG_AT_ONCE, "octavo-long-text")

    async def run(self, characters: int, work: Callable[[], T]) -> T:
        """The result of `work`, which reads so many characters."""
        pool = self._long if characters > LONG_CHARACTERS else None
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def encode(
        self, text: str, add_special_tokens: bool, max_tokens: int, name: str, cut: Cut | None = None
    ) -> list[int]:
        """Raises InvalidRequest about the field `name` for a long text that has more than `max_tokens` for certain,
        unless it is `cut`."""
        if len(text) <= AT_ONCE_CHARACTERS:
            return self._encode(text, add_special_tokens, cut)
        if len(text) > LONG_CHARACTERS and cut is None:
            await asyncio.to_thread(self.check, text, max_tokens, name)
        return await self.run(len(text), lambda: self._encode(text, add_special_tokens, cut))

    def _encode(self, text: str, add_special_tokens: bool, cut: Cut | None) -> list[int]:
        """Of what is cut only a part is looked at: what the tokens that are kept can stand for, and some text before
        or after it, so that the first or last of them is not cut itself."""
        if cut is None:
            return self._tokenizer.encode(text, add_special_tokens)
        longest = self._tokenizer.longest_text(cut.keep) + AT_ONCE_CHARACTERS
        text = text[-longest:] if cut.side == "left" else text[:longest]
        prefix = len(self._tokenizer.facts.prefix) if add_special_tokens else 0
        return cut.of(self._tokenizer.encode(text, add_special_tokens), prefix)

    async def render(
        self, write: Callable[[], str], messages: Sequence[Mapping[str, Any]], add_special_tokens: bool,
        max_tokens: int, cut: Cut | None = None,
    ) -> tuple[str, list[int]]:  # fmt: skip
        """What `write` makes of `messages`, and its tokens. Raises InvalidRequest as `encode` does."""

        def work() -> tuple[str, list[int]]:
            text = write()
            if len(text) > LONG_CHARACTERS and cut is None:
                self.check(text, max_tokens, "messages")
            return text, self._encode(text, add_special_tokens, cut)

        size = _size(messages)
        if size > LONG_CHARACTERS and cut is None:
            await asyncio.to_thread(self._check_messages, messages, max_tokens)
        return await self.run(size, work)

    def _check_messages(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> None:
        """Before they are written out; the template may leave something away, but hardly most of it."""
        texts = [text for message in messages for text in _texts(message.get("content"))]
        count = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if count > SHOWN_AT_LEAST * self._tokenizer.longest_text(max_tokens):
            self._refuse(count, max_tokens, "messages")

    def check(self, text: str, max_tokens: int, name: str) -> None:
        """Raises InvalidRequest for a text of more bytes than so many tokens can stand for."""
        count = len(text.encode("utf-8", "replace"))
        if count > self._tokenizer.longest_text(max_tokens):
            self._refuse(count, max_tokens, name)

    def _refuse(self, count: int, max_tokens: int, name: str) -> None:
        raise InvalidRequest(
            f"{name} has {count} bytes of text",
            limit=f"{max_tokens} tokens of context, at most {self._tokenizer.longest_text(max_tokens)} bytes",
            fix=f"shorten {name}", param=name,
        )  # fmt: skip

    def close(self) -> None:
        """What has not begun is dropped."""
        self._long.shutdown(wait=False, cancel_futures=True)


def _texts(content: Any) -> Iterator[str]:
    for part in [content] if isinstance(content, str) else content or ():
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text


def _size(value: Any) -> int:
    """Characters and values in it, counted until there are enough to call it long."""
    size, waiting = 0, [value]
    while waiting and size <= LONG_CHARACTERS:
        one = waiting.pop()
        if isinstance(one, (str, list, tuple, Mapping)):
            size += len(one)
        if size <= LONG_CHARACTERS and not isinstance(one, str):
            if isinstance(one, Mapping):
                waiting += [*one, *one.values()]
            elif isinstance(one, (list, tuple)):
                waiting += one
    return size
