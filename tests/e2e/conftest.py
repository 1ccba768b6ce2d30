"""One server with the default model for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.server_process import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory, smollm2_path) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    # Enough blocks for 64 requests of mixed-64 at once; float32 where there are no kernels.
    with ServerProcess(log, str(smollm2_path), "--served-model-name", "smollm2", "--max-model-len", "2048") as running:
        yield running


@pytest.fixture(scope="session")
def client(server) -> Iterator[openai.OpenAI]:
    """Checks every answer strictly against OpenAI's types."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120, _strict_response_validation=True
    ) as made:
        yield made
