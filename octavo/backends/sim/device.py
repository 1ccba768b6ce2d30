"""A device that computes nothing: tokens are made up, and a step takes as long as a roofline says.

All else is real: the scheduler, the batches, what sampling keeps between steps, the server. So it shows what a machine
could serve at best (published peaks, no cost of a launch or of exchange between ranks), lets the path from HTTP to the
device be loaded, and runs the scheduler over thousands of requests in a test, where its clock is a virtual one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.backends.base import Device, KVCache, SamplingTensors
from octavo.backends.kv import KVFormat, KVSpec
from octavo.backends.reference import Ops
from octavo.backends.sim.profiles import DEFAULT, GB, PROFILES
from octavo.clock import SYSTEM_CLOCK, Clock
from octavo.errors import NotEnoughMemory


class SimOps(Ops):
    """Chooses tokens without looking at probabilities, since there are none, and of those that a mask allows.

    `logits` [R, V] is one int64 a row, whatever the token (`models.simulated`): a mix of the last token and its
    position. So an answer is a pure function of prompt, seed and choice, whatever runs beside it.
    """

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        mixed = logits[:, 0].clone()
        if not params.all_greedy:
            mixed = torch.where(params.temperature == 0, mixed, mixed ^ params.keys)
        mixed >>= 17
        tokens = mixed % logits.shape[1]
        if params.mask is not None:
            for row, bits in zip(params.mask.rows.tolist(), params.mask.bits.numpy(), strict=True):
                allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
                if len(allowed):
                    tokens[row] = int(allowed[int(mixed[row]) % len(allowed)])
        return tokens

    def logprobs(self, logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chosen token counts as the best, and those after it as the next best, each half as probable."""
        ranks = torch.arange(top)
        values = ((ranks + 1) * -0.6931472).expand(len(token_ids), top)
        ids = (token_ids.unsqueeze(1) + ranks) % logits.shape[1]
        return torch.full(token_ids.shape, -0.6931472), torch.ones_like(token_ids), values, ids


class SimDevice(Device):
    """`clock` is the system's, or a virtual one. Work is queued as on a real device; `download` waits for it."""

    name = "sim"
    asynchronous = True
    page_multiple = 1
    dtypes = (torch.bfloat16, torch.float16)
    dist_backend = "gloo"
    torch_device = torch.device("cpu")

    def __init__(self, profile: str = DEFAULT) -> None:
        self.profile = PROFILES[profile]
        self.kernels = profile
        self.default_page_size = self.profile.page_size
        self.ops = SimOps()
        self.clock: Clock = SYSTEM_CLOCK
        self._held = 0
        self._done_at = 0.0

    @property
    def shares_host_memory(self) -> bool:
        return False

    def open(self, rank: int, threads: int | None) -> None:
        torch.set_num_threads(1)

    def memory(self) -> tuple[int, int]:
        return self.profile.memory, self.profile.memory - self._held

    def allocate_kv(
        self, spec: KVSpec, num_pages: int, page_size: int, dtype: torch.dtype, quantized: KVFormat | None = None
    ) -> KVCache:
        nothing = torch.empty((num_pages, page_size, 0, 0), dtype=dtype)
        return KVCache(nothing, nothing, page_size)

    def hold(self, weights_bytes: int) -> None:
        """Takes memory for weights. Raises NotEnoughMemory."""
        if weights_bytes > self.profile.memory:
            raise NotEnoughMemory(
                f"the weights need {weights_bytes / GB:.1f} GB", limit=f"{self.profile.memory / GB:.0f} GB",
                fix=f"raise --tensor-parallel-size or simulate another machine ({', '.join(PROFILES)})",
            )  # fmt: skip
        self._held = weights_bytes

    def compute(self, flops: float, read_bytes: float) -> None:
        """Queues work that is bound by arithmetic or by memory, whichever takes longer."""
        seconds = max(flops / self.profile.flops, read_bytes / self.profile.bandwidth)
        self._done_at = max(self._done_at, self.clock.monotonic()) + seconds

    def synchronize(self) -> None:
        remaining = self._done_at - self.clock.monotonic()
        if remaining > 0:
            self.clock.sleep(remaining)

    def upload(self, host: Tensor) -> Tensor:
        return host

    def download(self, tensor: Tensor) -> Tensor:
        self.synchronize()
        return tensor
