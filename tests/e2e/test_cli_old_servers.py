"""The field's old commands start today's server, with a real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POSTED = (
    "--device cpu --gpu-memory-utilization 0.88 --max-num-seqs 256 --max-num-batched-tokens 12288 --dtype float16 "
    "--paged-attention-block-size 32 --swap-space 1 --worker-use-ray --disable-log-requests --enforce-eager "
    "--trust-remote-code --threads 1 --max-model-len 2048 --port 0"
)


@contextmanager
def served(module: str, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The server's address, once it says so; ended by SIGTERM, which must end it with 0."""
    command = [sys.executable, "-m", module, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        try:
            found = None
            while not found and (line := server.stdout.readline()):
                found = re.search(r"http://[\d.]+:\d+", line)
            if found is None:
                assert server.stderr is not None
                pytest.fail(server.stderr.read())
            yield found[0], server
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                assert server.wait(60) == 0
            finally:
                server.kill()


def post(url: str, body: object, key: str | None = None) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_posted_command_serves_the_openai_api(smollm2_path):
    module = "octavo.entrypoints.openai.api_server"
    with served(module, "--model", str(smollm2_path), *POSTED.split(), "--served-model-name", "m") as (url, server):
        status, body = post(f"{url}/v1/completions", {"model": "m", "prompt": "One, two,", "max_tokens": 4})
        assert status == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] == 4
        assert post(f"{url}/generate", {"prompt": "x"})[0] == 404
        server.send_signal(signal.SIGTERM)
        assert server.stderr is not None
        said = server.stderr.read()
        assert said.count("octavo: warning: ") == 6
        assert "octavo: warning: --dtype float16: the device cpu computes in bfloat16 instead\n" in said
        assert said.count("float16: ") == 1, "said once"
        assert "--block-size 32" in said


def test_the_demonstration_server_answers_generate(smollm2_path):
    words = ["--model", str(smollm2_path), "--threads", "1", "--max-model-len", "1024", "--port", "0", "--api-key", "k"]
    with served("octavo.entrypoints.api_server", *words) as (url, _):
        with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
            assert response.status == 200
        assert post(f"{url}/generate", {"prompt": "x"})[0] == 401
        generate = f"{url}/generate"
        prompt = "The capital of France is"
        asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "use_beam_search": False, "stop": None}
        status, body = post(generate, asked, "k")
        assert status == 200, body
        (text,) = json.loads(body)["text"]
        assert text.startswith(prompt)
        assert len(text) > len(prompt)

        status, body = post(generate, {**asked, "stream": True}, "k")
        lines = [json.loads(line)["text"][0] for line in body.split(b"\n") if line]
        assert len(lines) > 1
        assert lines[-1] == text
        assert all(later.startswith(earlier) for earlier, later in pairwise(lines))

        status, body = post(generate, {**asked, "temperature": 1, "n": 3, "seed": 5}, "k")
        every = json.loads(body)["text"]
        assert len(every) == 3
        status, body = post(generate, {**asked, "use_beam_search": True, "n": 2, "best_of": 3}, "k")
        assert len(set(json.loads(body)["text"])) == 2, body
        status, body = post(generate, {**asked, "temperature": 1, "best_of": 3, "seed": 5}, "k")
        assert len(json.loads(body)["text"]) == 1 and json.loads(body)["text"][0] in every

        for wrong, name in [
            ({"prompt": 3}, "prompt"), ({}, "prompt"), ({"stream": "yes"}, "stream"), ({"best_of": 0}, "best_of"),
            ({"use_beam_search": True, "stream": True}, "use_beam_search"), ({"temperature": "hot"}, "temperature"),
            ({"top_p": 7}, "top_p"), ({"stop": 3}, "stop"), ({"logprobs": 2}, "logprobs"), ({"frob": 1}, "frob"),
        ]:  # fmt: skip
            status, body = post(generate, {**({"prompt": "x"} if wrong else {}), **wrong}, "k")
            assert status == 400, (wrong, body)
            assert name in json.loads(body)["error"]["message"]
        assert post(generate, [], "k")[0] == 400
