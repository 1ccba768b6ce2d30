"""A runner without arithmetic: it keeps what the plans make it write, page by page, and answers from what it can read.

A token depends on every token that the sequence should see, read back through the block tables that the plans
brought. So a wrong block, a lost token or a page given to two sequences changes answers or fails an assertion.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.kv import SlidingWindow
from octavo.engine.pages import KVLayout
from octavo.engine.plan import UNKNOWN, Chunk, NewSequence, Sampled, StepPlan, StepResult
from octavo.engine.types import TokenLogprobs


def next_token(tokens: list[int], vocab_size: int) -> int:
    """The answer of the null model to a context."""
    value = 7
    for token in tokens:
        value = (value * 1000003 + token + 1) % (1 << 61)
    return (value >> 20) % vocab_size


def continuation(prompt: list[int], length: int, vocab_size: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


@dataclass
class Known:
    new: NewSequence
    tables: list[dict[int, int]]
    tokens: list[int]
    """known so far, in order"""


class NullRunner:
    """With `guesses`, it drafts so many tokens after each sampled one, of which every third is wrong."""

    def __init__(self, layout: KVLayout, vocab_size: int, max_num_seqs: int, guesses: int = 0) -> None:
        self.guesses = guesses
        self.layout, self.vocab_size, self.max_num_seqs = layout, vocab_size, max_num_seqs
        self.memory: list[dict[tuple[int, int], tuple[int, int, int]]] = [{} for _ in layout.specs]
        self.known: dict[int, Known] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for sequence_id in plan.removed:
            self.known.pop(sequence_id, None)
        for new in plan.added:
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            self.known[new.sequence_id] = Known(new, [{} for _ in self.layout.specs], tokens)
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
                sampled.append([Sampled(token) for token in given])
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
        tables, tokens = self.known[chunk.sequence_id].tables, self.known[chunk.sequence_id].tokens
        assert chunk.start <= len(tokens) and UNKNOWN not in chunk.token_ids
        tokens[chunk.start : chunk.end] = chunk.token_ids
        size = self.layout.page_size
        for group, (first, new) in enumerate(zip(chunk.first_new_block, chunk.new_blocks, strict=True)):
            for offset, block in enumerate(new):
                assert 0 <= block < self.layout.num_blocks[group]
                tables[group][first + offset] = block
            for position, token in enumerate(chunk.token_ids, chunk.start):
                place = (tables[group][position // size], position % size)
                self.memory[group][place] = (chunk.sequence_id, position, token)

    def _read(self, chunk: Chunk) -> list[int]:
        """All tokens of the sequence up to the chunk's end, each read wherever some group must still hold it."""
        tokens = self.known[chunk.sequence_id].tokens[: chunk.start]
        for group, spec in enumerate(self.layout.specs):
            start = max(0, chunk.start - spec.window + 1) if isinstance(spec, SlidingWindow) else 0
            seen = [self._at(chunk.sequence_id, group, position) for position in range(start, chunk.end)]
            if start == 0:
                tokens = seen
            else:
                assert tokens[start:] == seen[: len(tokens) - start]
        return tokens

    def _at(self, sequence_id: int, group: int, position: int) -> int:
        block = self.known[sequence_id].tables[group][position // self.layout.page_size]
        owner, where, token = self.memory[group][block, position % self.layout.page_size]
        assert (owner, where) == (sequence_id, position), f"block {block} holds another's tokens"
        return token
