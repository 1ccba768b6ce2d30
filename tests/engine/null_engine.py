"""An engine process without a model: the real loop over the null runner of `tests/null`. Starts in a moment.

Prompts steer it: token 1 makes a step slow (0.2 s), 2 makes a step fail for that sequence, 3 makes every step fail, 4
hangs in the step.
"""

from __future__ import annotations

import os
import time

from octavo.backends.kv import FullAttention
from octavo.config import EngineConfig
from octavo.engine.core import main
from octavo.engine.messages import EngineFacts
from octavo.engine.pages import KVLayout
from octavo.engine.plan import SequenceFault, StepPlan, StepResult
from octavo.errors import NotEnoughMemory
from tests.null.memory import NullRunner

SLOW, FAULT, BROKEN, HANG = 1, 2, 3, 4


class NullExecutor:
    host_memory = None

    def __init__(self, config: EngineConfig) -> None:
        blocks, page_size = config.num_gpu_blocks_override or 64, config.block_size or 4
        self.layout = KVLayout(page_size, (FullAttention(1, 1),), (blocks,))
        self.runner = NullRunner(self.layout, config.vocab_size, config.max_num_seqs)
        self.facts = EngineFacts(
            os.getpid(), "null", "none", "none", blocks, page_size, config.max_model_len, 0, 0, 0.0
        )  # fmt: skip

    def run(self, plan: StepPlan) -> StepResult:
        known = {i: k.new for i, k in self.runner.known.items()} | {n.sequence_id: n for n in plan.added}
        for chunk in plan.chunks:
            first = known[chunk.sequence_id].prompt_token_ids[0]
            if first == FAULT:
                raise SequenceFault(chunk.sequence_id) from ValueError("this sequence is broken")
            if first == BROKEN:
                raise ValueError("this step is broken")
            if first in (SLOW, HANG):
                time.sleep(0.2 if first == SLOW else 3600)
        return self.runner.run(plan)

    def shutdown(self) -> None:
        pass


def start(config, directory, progress):
    for done in range(3):
        progress("loading", done, 2)
        time.sleep(0.05)
    if config.model == "too-big":
        raise NotEnoughMemory("the null model does not fit", limit="nothing")
    if config.model == "dies":
        print("about to die", flush=True)
        os._exit(7)
    return NullExecutor(config)


if __name__ == "__main__":
    main(start)
