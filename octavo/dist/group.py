"""A group of ranks, one process each, that hold parts of one model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Group:
    """This process's place among `size` ranks. `SINGLE` is the group of one, in which nothing is ever sent."""

    def __init__(self, rank: int, size: int) -> None:
        assert 0 <= rank < size, (rank, size)
        self.rank, self.size = rank, size

    @staticmethod
    def join(rank: int, size: int, backend: str, rendezvous: str) -> Group:
        """Waits until all ranks have come to `rendezvous`, a URL such as file:///dir/name or tcp://127.0.0.1:port."""
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
        return Group(rank, size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replaces `tensor` by its sum over the ranks, and returns it.

        Added in rank order in float32, not by the backend: a ring's order depends on where an element lies in the
        buffer, and so on what else is in the batch.
        """
        if self.size > 1:
            total = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
            for part in self._gather(tensor):
                total += part
            tensor.copy_(total)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The ranks' tensors side by side along the last dimension, in rank order."""
        return tensor if self.size == 1 else torch.cat(self._gather(tensor), dim=-1)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Replaces `tensor` by that of rank `source`, and returns it."""
        if self.size > 1:
            dist.broadcast(tensor, source)
        return tensor

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts


SINGLE = Group(0, 1)
