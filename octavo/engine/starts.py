"""What a waiting sequence begins with instead of computing it: what a sibling or the prefix cache has. No torch.

The choices of a request have one prompt. The first that runs computes it; the others wait, in their places, and then
share its full blocks and copy the last one. Where there is no sibling to fork from, since it ended, was preempted or
has let go of what a window no longer needs, whoever comes next computes the prompt, with what the cache has of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.engine.pages import NOTHING, Elsewhere, KVBlocks, Start
from octavo.engine.prefix import ChainKeys, root_key
from octavo.engine.sequence import Sequence
from octavo.engine.tiers import Tiers


def keys_of(sequence: Sequence, page_size: int) -> ChainKeys:
    request = sequence.request
    root = root_key(request.cache_salt, sequence.adapter_digest, request.multimodal)
    return ChainKeys(root, page_size, request.prompt_token_ids, sequence.output_token_ids)


def start_of(sequence: Sequence, siblings: Iterable[Sequence], blocks: KVBlocks, tiers: Tiers) -> Start | None:
    """The most that is there, what was swapped out before all else; None while it must wait: for blocks from the disk,
    which are asked for here, or for a sibling that is computing the prompt.
    """
    if sequence.swapped is not None:
        start = tiers.resume(sequence.swapped, sequence.keys)
        if start is not None:
            return start
        tiers.drop(sequence.swapped)
        sequence.start_over()
    if sequence.fetch is not None and not sequence.fetch.done:
        return None
    start = _found(sequence, siblings, blocks, tiers.on_host)
    if start is None or sequence.looked_on_disk or tiers.disk is None or sequence.keys is None:
        return start
    sequence.looked_on_disk = True
    further = _found(sequence, siblings, blocks, tiers.anywhere)
    if further is not None and further.num_tokens > start.num_tokens:
        sequence.fetch = tiers.fetch(further, sequence.keys, start.num_tokens)
    return start if sequence.fetch is None else None


def _found(sequence: Sequence, siblings: Iterable[Sequence], blocks: KVBlocks, elsewhere: Elsewhere) -> Start | None:
    """The most that is in the cache or a sibling has; None while one is computing the prompt.

    At least one token is left to compute, as without it none can be sampled. A prompt whose logprobs are wanted is
    computed whole.
    """
    if sequence.prompt_logprobs is not None:
        return NOTHING
    if sequence.origin is not None and (start := _fork_beam(sequence, sequence.origin, blocks)) is not None:
        return start
    most = min(sequence.num_tokens, sequence.num_expected_tokens - 1)
    forked = _fork(sequence, siblings, blocks, min(sequence.num_prompt_tokens, most))
    if forked is None:
        return None
    found = NOTHING if sequence.keys is None else blocks.find(sequence.keys, most, elsewhere)
    return found if found.num_tokens > forked.num_tokens else forked


def _fork_beam(sequence: Sequence, origin: Sequence, blocks: KVBlocks) -> Start | None:
    """All tokens but the last, as the beam has them that it comes from; None where that does not run any more."""
    num_shared = sequence.num_tokens - 1
    if not origin.held.tables[0] or origin.num_computed_tokens < num_shared:
        return None
    _follow(sequence, origin, num_shared // blocks.layout.page_size)
    return blocks.start_of(origin.held, num_shared)


def _follow(sequence: Sequence, other: Sequence, num_blocks: int) -> None:
    if sequence.keys is not None and other.keys is not None:
        sequence.keys.follow(other.keys, num_blocks)


def _fork(sequence: Sequence, siblings: Iterable[Sequence], blocks: KVBlocks, num_shared: int) -> Start | None:
    """The prompt's first `num_shared` tokens as a running sibling has them; None while one is computing them."""
    start: Start | None = NOTHING
    for sibling in siblings if num_shared else ():
        if not sibling.held.tables[0]:
            continue
        if sibling.num_computed_tokens < num_shared:
            start = None
        elif (there := blocks.start_of(sibling.held, num_shared)) is not None:
            _follow(sequence, sibling, num_shared // blocks.layout.page_size)
            return there
    return start
