"""Which tokens a sequence may have next, by its sampling parameters and its own output alone. No torch.

A `Constraints` exists only for a sequence that asks for something of it. It follows the output token by token, and can
take tokens back: guesses of speculative decoding are noted one by one to ask what would be allowed after them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.engine.plan import NewSequence
from octavo.engine.types import SamplingParams

TokenArray = npt.NDArray[np.int64]


class Constraints:
    """Of one sequence. `bias` is (tokens, values); `banned` and `mask` are asked anew for each position."""

    def __init__(self, new: NewSequence, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        p = new.sampling
        self._output: list[int] = []
        self._min_tokens = p.min_tokens
        self._ends = _array({*eos_token_ids, *p.stop_token_ids})
        self._bad_words = BadWords(p.bad_word_ids)
        self._thinking = Thinking(p, new.prompt_token_ids) if p.thinking_token_budget is not None else None
        self.bias: tuple[TokenArray, npt.NDArray[np.float32]] | None = None
        if p.logit_bias:
            self.bias = (_array(p.logit_bias), np.fromiter(p.logit_bias.values(), np.float32, len(p.logit_bias)))
        allowed = p.allowed_token_ids
        self._allowed = None if allowed is None else bitmask(allowed, vocab_size)
        for token in new.output_token_ids:
            self.note(token)

    @property
    def num_noted(self) -> int:
        return len(self._output)

    def note(self, token: int) -> None:
        """One more `token` in the output."""
        self._output.append(token)
        if self._thinking is not None:
            self._thinking.note(token)

    def undo(self) -> None:
        """Takes the last token back."""
        self._output.pop()
        if self._thinking is not None:
            self._thinking.undo()

    def mask(self) -> npt.NDArray[np.int32] | None:
        """int32 [ceil(V / 32)], bits of the tokens that may come; None for all."""
        return self._allowed

    def banned(self) -> list[TokenArray]:
        """Tokens that may not come next; one may be named twice."""
        found = self._bad_words.banned_after(self._output)
        if len(self._output) < self._min_tokens:
            found.append(self._ends)
        return found

    def forced(self) -> int | None:
        """The token that must come next, whatever else holds."""
        return None if self._thinking is None else self._thinking.forced()


def constraints_of(new: NewSequence, eos_token_ids: Sequence[int], vocab_size: int) -> Constraints | None:
    """None for a sequence that may have any token at any time."""
    p = new.sampling
    asked = p.allowed_token_ids is not None or p.logit_bias or p.bad_word_ids or p.thinking_token_budget is not None
    return Constraints(new, eos_token_ids, vocab_size) if asked or p.min_tokens else None


class BadWords:
    """Bans the last token of each of `sequences` where the output ends with the tokens before it."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._always = _array({word[0] for word in sequences if len(word) == 1})
        self._longer: dict[int, list[tuple[list[int], TokenArray]]] = defaultdict(list)
        for word in sequences:
            if len(word) > 1:
                self._longer[word[-2]].append((list(word[:-1]), _array(word[-1:])))

    def banned_after(self, output: list[int]) -> list[TokenArray]:
        found = [self._always] if len(self._always) else []
        if output and self._longer:
            ends = self._longer.get(output[-1], ())
            found += [last for before, last in ends if output[-len(before) :] == before]
        return found


class Thinking:
    """Ends a model's thinking, the tokens after the mark that starts it, once there are as many as the budget.

    Marks in the prompt count: a chat template may begin the thinking itself.
    """

    def __init__(self, p: SamplingParams, prompt: Sequence[int]) -> None:
        assert p.thinking_token_budget is not None and p.thinking_marks is not None, "admission fills in the marks"
        self._budget = p.thinking_token_budget
        self._start, self._end = p.thinking_marks
        self._length = len(prompt)
        backwards = prompt[::-1]
        marks = [mark for mark in p.thinking_marks if mark in backwards]
        self._marks = sorted((self._length - backwards.index(mark), mark) for mark in marks)
        """(how many tokens there are up to and with it, token) of each mark; of the prompt's only the last ones"""

    def note(self, token: int) -> None:
        self._length += 1
        if token in (self._start, self._end):
            self._marks.append((self._length, token))

    def undo(self) -> None:
        if self._marks and self._marks[-1][0] == self._length:
            self._marks.pop()
        self._length -= 1

    def forced(self) -> int | None:
        if not self._marks:
            return None
        since, mark = self._marks[-1]
        return self._end if mark == self._start and self._length - since >= self._budget else None


def bitmask(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """int32 [ceil(V / 32)] with the bits of `tokens` set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.fromiter(tokens, np.int64, len(tokens))] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def _array(tokens: Sequence[int] | set[int] | dict[int, float]) -> TokenArray:
    return np.fromiter(tokens, np.int64, len(tokens))
