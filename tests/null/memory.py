"""A runner without arithmetic: it keeps what the plans make it write, page by page, and answers from what it can read.

What is kept at a position stands for all tokens up to it, as keys and values do, and whoever should see it checks it
through the block tables that the plans brought. So a wrong block, a lost token, a shared block that is written, or a
prefix that was another's fails an assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from octavo.backends.kv import SlidingWindow
from octavo.engine.pages import KVLayout
from octavo.engine.plan import COPY, LOAD, SAVE, UNKNOWN, Chunk, Move, NewSequence, Sampled, StepPlan, StepResult
from octavo.engine.types import TokenLogprobs


def values_of(tokens: list[int], start: int = 7) -> list[int]:
    """What stands for the tokens up to each of them."""
    chain = accumulate(tokens, lambda value, token: (value * 1000003 + token + 1) % (1 << 61), initial=start)
    return list(chain)[1:]


def next_token(tokens: list[int], vocab_size: int) -> int:
    """The answer of the null model to a context."""
    return (values_of(tokens)[-1] >> 20) % vocab_size


def continuation(prompt: list[int], length: int, vocab_size: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


def likeliest(tokens: list[int], count: int, vocab_size: int) -> TokenLogprobs:
    """The answer's logprobs, and those of the `count` best tokens. `vocab_size` is no multiple of 7."""
    first, value = next_token(tokens, vocab_size), values_of(tokens)[-1]
    best = [(first + 7 * place) % vocab_size for place in range(count)]
    logprobs = [-0.1 - (value >> 5) % 1000003 / 1e6 - 0.37 * place for place in range(max(1, count))]
    return TokenLogprobs([first, *best], [logprobs[0], *logprobs[:count]], 1)


@dataclass
class Known:
    new: NewSequence
    tables: list[dict[int, int]]
    tokens: list[int]
    """known so far, in order"""
    values: list[int] = field(default_factory=list)
    """what stands for the first of them"""
    root: int = 0
    """stands for what else they depend on, such as an adapter"""

    def value(self, position: int) -> int:
        if len(self.values) <= position:
            before = self.values[-1] if self.values else 7 + self.root
            self.values += values_of(self.tokens[len(self.values) : position + 1], before)
        return self.values[position]


class NullRunner:
    """With `guesses`, it drafts so many tokens after each sampled one, of which every third is wrong.

    It is its own `tiers.HostMemory`, of `host_slots` for each KV group.
    """

    def __init__(
        self, layout: KVLayout, vocab_size: int, max_num_seqs: int, guesses: int = 0, host_slots: int = 0
    ) -> None:
        self.guesses = guesses
        self.num_slots = (host_slots,) * len(layout.specs)
        self.block_bytes = (layout.page_size,) * len(layout.specs)
        self.slots: list[dict[tuple[int, int], int]] = [{} for _ in layout.specs]
        self.layout, self.vocab_size, self.max_num_seqs = layout, vocab_size, max_num_seqs
        self.memory: list[dict[tuple[int, int], int]] = [{} for _ in layout.specs]
        self.known: dict[int, Known] = {}
        self.root_of: Callable[[NewSequence], int] = lambda new: new.adapter

    def run(self, plan: StepPlan) -> StepResult:
        self.move(plan.moves)
        for sequence_id in plan.removed:
            self.known.pop(sequence_id, None)
        for new in plan.added:
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            tables: list[dict[int, int]] = [{} for _ in self.layout.specs]
            self.known[new.sequence_id] = Known(new, tables, tokens, root=self.root_of(new))
        assert len(self.known) <= self.max_num_seqs, "runners were not told to forget"
        assert len({c.sequence_id for c in plan.chunks}) == len(plan.chunks), "a sequence has two chunks in a step"
        for chunk in plan.chunks:
            self._write(chunk)
        sampled: list[list[Sampled] | None] = []
        prompt_logprobs, drafts = {}, {}
        for chunk in plan.chunks:
            tokens = self._read(chunk)
            if chunk.sample:
                given = self._sample(tokens, chunk.num_drafts)
                count = self.known[chunk.sequence_id].new.sampling.logprobs
                known = tokens[: len(tokens) - chunk.num_drafts]
                sampled.append([
                    Sampled(t, None if count is None else likeliest(known + given[:i], count, self.vocab_size))
                    for i, t in enumerate(given)
                ])  # fmt: skip
                context = tokens[: len(tokens) - chunk.num_drafts] + given
                right = continuation(context, self.guesses, self.vocab_size)
                drafts[chunk.sequence_id] = [
                    t if (t + i) % 3 else (t + 1) % self.vocab_size for i, t in enumerate(right)
                ]
            if chunk.prompt_logprobs:
                prompt = self.known[chunk.sequence_id].new.prompt_token_ids
                following = prompt[chunk.start + 1 : chunk.end + 1]
                prompt_logprobs[chunk.sequence_id] = [TokenLogprobs([t], [-float(t)], 1) for t in following]
        return StepResult(sampled, prompt_logprobs, drafts)

    def move(self, moves: Iterable[Move]) -> None:
        for move in moves:
            device, host = self.memory[move.group], self.slots[move.group]
            source, target = {COPY: (device, device), SAVE: (device, host), LOAD: (host, device)}[move.kind]
            for offset in range(self.layout.page_size):
                target.pop((move.target, offset), None)
                if (move.source, offset) in source:
                    target[move.target, offset] = source[move.source, offset]

    def view(self, group: int, slot: int) -> memoryview:
        raise AssertionError("there is no disk")

    def _sample(self, tokens: list[int], num_drafts: int) -> list[int]:
        """The tokens that follow: as many as drafts at the end of `tokens` were right, and one."""
        given: list[int] = []
        for end in range(len(tokens) - num_drafts, len(tokens) + 1):
            given.append(next_token(tokens[:end], self.vocab_size))
            if end < len(tokens) and tokens[end] != given[-1]:
                break
        return given

    def _write(self, chunk: Chunk) -> None:
        assert chunk.token_ids, "an empty chunk"
        known = self.known[chunk.sequence_id]
        assert chunk.start <= len(known.tokens) and UNKNOWN not in chunk.token_ids
        known.tokens[chunk.start : chunk.end] = chunk.token_ids
        del known.values[chunk.start :]
        size = self.layout.page_size
        for group, (first, new) in enumerate(zip(chunk.first_new_block, chunk.new_blocks, strict=True)):
            for offset, block in enumerate(new):
                assert 0 <= block < self.layout.num_blocks[group]
                known.tables[group][first + offset] = block
            for position in range(chunk.start, chunk.end):
                place = (known.tables[group][position // size], position % size)
                self.memory[group][place] = known.value(position)

    def _read(self, chunk: Chunk) -> list[int]:
        """All tokens of the sequence up to the chunk's end, once all that this chunk looks at is seen to be there."""
        known, size = self.known[chunk.sequence_id], self.layout.page_size
        for group, spec in enumerate(self.layout.specs):
            first = max(0, chunk.start - spec.window + 1) if isinstance(spec, SlidingWindow) else 0
            for position in range(first, chunk.end):
                block = known.tables[group][position // size]
                found = self.memory[group].get((block, position % size))
                assert found == known.value(position), f"block {block} holds another's tokens"
        return known.tokens[: chunk.end]
