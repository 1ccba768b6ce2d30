"""Tokens to text as they come, and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4
"""bytes of a character in UTF-8"""


class Detokenizer:
    """Turns one choice's tokens into text, a piece at a time; the pieces together are `Tokenizer.decode` of all.

    Held back are the bytes of an unfinished character, and text that may be the start of a stop string. The output goes
    on where the prompt ends: a first space is dropped only if the prompt shows no text, and a character that the prompt
    left unfinished is finished. Which stop string is found does not depend on how the text is cut into tokens: it is
    the one that is complete first, and of several complete at once the one that started first. One that the first
    `stop_after` tokens complete does not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        prompt_token_ids: Sequence[int] = (),
        stop_after: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stop = [_StopString(text) for text in stop]
        self._include_stop = include_stop
        self._stop_after, self._count = stop_after, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._strip = tokenizer.strip_first_space
        self._follow(prompt_token_ids)
        self.stopped: str | None = None
        """the stop string that was found; nothing comes after it"""
        self.used = 0
        """of the tokens last pushed, how many were taken: all, or up to the one that completed the stop string"""

    def _follow(self, prompt_token_ids: Sequence[int]) -> None:
        tail = b""
        for id in reversed(prompt_token_ids):
            if id not in self._skipped:
                tail = self._tokenizer.token_bytes(id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        if tail:
            self._strip = False
            self._decoder.decode(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that can be shown now."""
        shown, self.used = [], 0
        for id in token_ids:
            if self.stopped is not None:
                break
            self.used += 1
            self._count += 1
            if id not in self._skipped:
                shown.append(self._take(self._decoder.decode(self._raw(id))))
        return "".join(shown)

    def _raw(self, id: int) -> bytes:
        raw = self._tokenizer.token_bytes(id)
        if self._strip and raw:
            self._strip = False
            return raw.removeprefix(b" ")
        return raw

    def flush(self) -> str:
        """What was held back, when no more tokens come; an unfinished character shows as U+FFFD."""
        if self.stopped is not None:
            return ""
        shown = self._take(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return shown + held

    def _take(self, text: str) -> str:
        if not self._stop:
            return text
        shown = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            complete = [stop.text for stop in self._stop if stop.advance(character)]
            if complete and self._count > self._stop_after:
                self.stopped = max(complete, key=len)
                self._held = ""
                return shown[: position if self._include_stop else position - len(self.stopped)]
        keep = max(stop.matched for stop in self._stop)
        self._held = shown[len(shown) - keep :]
        return shown[: len(shown) - keep]


class _StopString:
    """Follows a text character by character (Knuth, Morris and Pratt 1977): constant time each, amortized."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """length of the longest start of the stop string that the text so far ends with"""
        self._fallback = [0]
        """at i: the same for the stop string's own characters 1 to i"""
        for character in text[1:]:
            self._fallback.append(self._next(self._fallback[-1], character))

    def _next(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)

    def advance(self, character: str) -> bool:
        """Whether `character` completes the stop string, which may overlap with one that was complete before."""
        if self.matched == len(self.text):
            self.matched = self._fallback[-1]
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.text)
