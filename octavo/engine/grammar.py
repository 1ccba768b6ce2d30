"""Grammars in the engine: where each sequence that has one stands in it, and a step's masks. No torch.

Masks are computed beside the device's work: `begin` before the model runs, `finish` when its logits are there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from octavo.engine.plan import Chunk, NewSequence
from octavo.engine.structured import grammar_of
from octavo.engine.types import StructuredOutputsParams
from octavo.text.grammar import limits, words_of
from octavo.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_KNOWN = 64
"""compiled grammars that are kept for the next sequence; each has a few hundred kilobytes at first"""
MASK_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
Bits = npt.NDArray[np.int32]


def fault_of(matcher: LLMatcher) -> str | None:
    return matcher.get_error().splitlines()[0] if matcher.is_error() else None


class Compiler:
    """Grammars to matchers, in a thread of its own; the tokenizer is read there too, for the first of them."""

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size, self.eos_token_ids = vocab_size, frozenset(eos_token_ids)
        self._load = load
        self._words: LLTokenizer | None = None
        self._pool = ThreadPoolExecutor(1, "octavo-compile")
        self._known: OrderedDict[bytes, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, asked: StructuredOutputsParams) -> Future[LLMatcher]:
        """A matcher at the grammar's start, to be copied, some time later. Never waits."""
        name = msgspec.json.encode(asked)
        with self._lock:
            if name not in self._known:
                self._known[name] = self._pool.submit(self._compile, asked)
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end(name)
            return self._known[name]

    def _compile(self, asked: StructuredOutputsParams) -> LLMatcher:
        if self._words is None:
            self._words = words_of(self._load(), self.vocab_size, sorted(self.eos_token_ids))
        return LLMatcher(self._words, grammar_of(asked), log_level=0, limits=limits())


class Place:
    """Where one sequence stands in its grammar: its output, which the matcher follows when a mask is needed."""

    def __init__(self, start: Future[LLMatcher], eos_token_ids: frozenset[int], output: Sequence[int]) -> None:
        self.fault: str | None = None
        """of the grammar: why no token can be allowed any more"""
        self._start, self._eos = start, eos_token_ids
        self._matcher: LLMatcher | None = None
        self._output = list(output)
        self._fed: list[bool] = []
        """for each token that the matcher has seen, whether it took it; it takes none from the end on"""

    @property
    def num_noted(self) -> int:
        return len(self._output)

    def note(self, token: int) -> None:
        self._output.append(token)

    def undo(self) -> None:
        self._output.pop()
        if self._matcher is not None and len(self._fed) > len(self._output):
            if self._fed.pop():
                self._matcher.rollback(1)
            self.fault = fault_of(self._matcher)

    @property
    def open(self) -> bool:
        """Whether the matcher has taken all that it has seen."""
        return all(self._fed[-1:])

    def matcher(self) -> LLMatcher:
        """Having taken in all the output. Waits for the compiler."""
        if self._matcher is None:
            self._matcher = self._start.result().deep_copy()
        for token in self._output[len(self._fed) :]:
            wanted = self.open and token not in self._eos
            self._fed.append(wanted and self._matcher.try_consume_tokens([token]) == 1)
            if wanted and not self.open:
                refusal = f"it does not allow token {token} as number {len(self._fed)} of the answer"
                self.fault = fault_of(self._matcher) or refusal
        return self._matcher


class Masks:
    """Of the sampler's rows that have a grammar; belongs to the thread that runs steps."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._width = -(-compiler.vocab_size // 32)
        self.places: dict[int, Place] = {}
        self._helper = ThreadPoolExecutor(1, "octavo-masks")
        self._job: Future[dict[int, Bits]] | None = None

    @cached_property
    def _executor(self) -> LLExecutor:
        """Has threads of its own, so it is made for the first grammar."""
        return LLExecutor(MASK_THREADS)

    def __bool__(self) -> bool:
        return bool(self.places)

    def add(self, row: int, new: NewSequence) -> None:
        asked = new.sampling.structured_outputs
        if asked is not None:
            start = self._compiler.begin(asked)
            self.places[row] = Place(start, self._compiler.eos_token_ids, new.output_token_ids)

    def remove(self, row: int) -> None:
        self.places.pop(row, None)

    def note(self, row: int, tokens: Sequence[int]) -> None:
        if (place := self.places.get(row)) is not None:
            for token in tokens:
                place.note(token)

    def begin(self, chunks: Sequence[tuple[Chunk, int]]) -> None:
        """Starts on the masks that follow the chunks, each with its row; all output before their drafts is noted."""
        wanted: list[tuple[Place, int, list[int]]] = []
        first = 0
        for chunk, row in chunks:
            if (place := self.places.get(row)) is not None:
                drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
                wanted.append((place, first, drafts))
            first += chunk.num_drafts + 1
        self._settle()
        if wanted:
            self._job = self._helper.submit(self._compute, wanted)

    def at_once(self, rows: Sequence[int]) -> dict[int, Bits]:
        """By index in `rows`, of those that have a grammar: the tokens that may come next."""
        wanted: list[tuple[Place, int, list[int]]] = [
            (self.places[row], i, []) for i, row in enumerate(rows) if row in self.places
        ]
        return self._compute(wanted) if wanted else {}

    def finish(self) -> dict[int, Bits]:
        """By row of the logits, int32 [ceil(V / 32)]: the tokens that its sequence may have."""
        job, self._job = self._job, None
        return {} if job is None else job.result()

    def _settle(self) -> None:
        """Waits for masks of a step that failed: nobody asks for them, but the matchers are still in use."""
        if self._job is not None:
            self._job.exception()
            self._job = None

    def _compute(self, wanted: Sequence[tuple[Place, int, list[int]]]) -> dict[int, Bits]:
        count = sum(len(drafts) + 1 for _, _, drafts in wanted)
        bits = np.full((count, self._width), -1, np.int32)
        masks: dict[int, Bits] = {}
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        asked: list[tuple[Place, LLMatcher, int]] = []
        for place, first, drafts in wanted:
            at = len(masks)
            masks.update({first + i: bits[at + i] for i in range(len(drafts) + 1)})
            try:
                matcher = place.matcher()
            except Exception as err:  # whatever it is, the step's other sequences have no part in it
                log.exception("a grammar could not be compiled")
                place.fault = f"it could not be compiled: {err}"
            if place.fault is not None:
                bits[at] = 0
            elif place.open:
                asked.append((place, matcher, at))
                if drafts := self._before_end(drafts):
                    drafted.append((matcher, at, drafts))
                else:
                    plain.append((matcher, at))
        where, size = bits.ctypes.data, self._width * bits.itemsize
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, where, size, count)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, where, size, count)
        for place, matcher, at in asked:
            place.fault = fault_of(matcher)
            if place.fault is not None:
                bits[at] = 0
        return masks

    def _before_end(self, drafts: list[int]) -> list[int]:
        """What comes after an end is not looked at, and no matcher takes an end."""
        end = next((i for i, token in enumerate(drafts) if token in self._compiler.eos_token_ids), len(drafts))
        return drafts[:end]
