"""What names the content of a KV block: a chain of SHA-256 digests over all tokens up to its end. No torch.

    root  = H(cache_salt, adapter, multimodal)
    key 0 = H(root  ‖ tokens of block 0)
    key i = H(key i-1 ‖ tokens of block i)

Equal keys mean equal tokens from position 0 on, under equal salt, adapter and images, so equal keys and values.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

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

    def __getitem__(self, index: int) -> bytes:
        """The key of full block `index`, whose tokens must all be known."""
        while len(self._keys) <= index:
            start = len(self._keys) * self._page_size
            tokens = array("i", self._tokens(start, start + self._page_size))
            assert len(tokens) == self._page_size, "a block's tokens are not all known"
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(sha256(parent + tokens.tobytes()).digest())
        return self._keys[index]

    def _tokens(self, start: int, end: int) -> list[int]:
        prompt = len(self._prompt)
        if end <= prompt:
            return self._prompt[start:end]
        return self._prompt[start:] + self._output[max(0, start - prompt) : end - prompt]

    def follow(self, other: ChainKeys, num_blocks: int) -> None:
        """Takes over what is computed of the keys of a sequence whose first `num_blocks` blocks are the same."""
        if self._root == other._root and len(self._keys) < num_blocks:
            self._keys = other._keys[:num_blocks]
