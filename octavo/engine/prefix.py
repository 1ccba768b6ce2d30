"""What names the content of a KV block: a SHA-256 digest of all tokens up to its end. No torch.

    root  = H(cache_salt, adapter, multimodal)
    key i = H(root ‖ tokens of blocks 0 … i)

The digest runs on from block to block. Equal keys mean equal tokens from position 0 on, under equal salt, adapter and
images, so equal keys and values.
"""

from __future__ import annotations

from hashlib import sha256
from struct import pack

import msgspec


def root_key(cache_salt: str | None, adapter: bytes | None, multimodal: bytes | None) -> bytes:
    """`adapter`: a digest of the adapter's content, since its name may come to mean another."""
    return sha256(msgspec.msgpack.encode((cache_salt, adapter, multimodal))).digest()


class ChainKeys:
    """One sequence's keys, each computed once and not before it is asked for.

    `prompt` and `output` are the sequence's own lists; a token that stands in them stays.
    """

    def __init__(self, root: bytes, page_size: int, prompt: list[int], output: list[int]) -> None:
        self._root, self._page_size, self._prompt, self._output = root, page_size, prompt, output
        self._keys: list[bytes] = []
        self._digest = sha256(root)
        self._num_digested = 0
        self.unsettled: list[tuple[int, list[int]]] = []
        """(KV group, blocks) that are to be found under these keys, which nobody has asked for yet"""

    def __getitem__(self, index: int) -> bytes:
        """The key of full block `index`, whose tokens must all be known."""
        if index >= len(self._keys):
            self._reach(index + 1)
        return self._keys[index]

    def between(self, start: int, end: int) -> list[bytes]:
        if end > len(self._keys):
            self._reach(end)
        return self._keys[start:end]

    def _reach(self, count: int) -> None:
        start, end = self._num_digested * self._page_size, count * self._page_size
        tokens = self._tokens(start, end)
        assert len(tokens) == end - start, "a block's tokens are not all known"
        content, size = pack(f"<{len(tokens)}i", *tokens), 4 * self._page_size
        digest, keys = self._digest, self._keys
        known = (len(keys) - self._num_digested) * size
        digest.update(content[:known])
        for offset in range(known, len(content), size):
            digest.update(content[offset : offset + size])
            keys.append(digest.digest())
        self._num_digested = count

    def _tokens(self, start: int, end: int) -> list[int]:
        prompt = len(self._prompt)
        if end <= prompt:
            return self._prompt[start:end]
        return self._prompt[start:] + self._output[max(0, start - prompt) : end - prompt]

    def follow(self, other: ChainKeys, num_blocks: int) -> None:
        """Takes over what is computed of the keys of a sequence whose first `num_blocks` blocks are the same."""
        theirs = other._keys[:num_blocks]
        if self._root == other._root and len(self._keys) < len(theirs):
            self._keys = theirs
