"""What the launcher refuses, and what it prints."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys

import pytest

from octavo.config import MAX_PORT, EngineArgs, ModelFacts, ServerArgs, resolve
from octavo.errors import UsageError
from octavo.server.launch import example, serve
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/launch")


@pytest.mark.parametrize("port", [-1, MAX_PORT + 1, 99999, RNG.randint(MAX_PORT + 1, 1 << 40)])
def test_ports_that_there_are_not(port, capsys):
    """Also those that the system's resolver would take for another, its remainder by 65536."""
    assert serve(EngineArgs("smollm2"), ServerArgs(port=port)) == 2
    said = capsys.readouterr().err
    assert f"--port {port} is out of range; limit: 0 to 65535" in said, said


@pytest.mark.parametrize(("field", "flag"), [
    ("max_body_bytes", "--max-body-bytes"), ("max_buffered_events", "--max-buffered-events"),
    ("shutdown_timeout_s", "--shutdown-timeout"),
])  # fmt: skip
@pytest.mark.parametrize("value", [-1, -RNG.randint(2, 1 << 40), float("nan")])
def test_server_settings_that_cannot_be(field, flag, value):
    with pytest.raises(UsageError, match=f"^{flag} {value} is out of range"):
        ServerArgs(**{field: value}).verify()


@pytest.mark.parametrize(("field", "value"), [("max_logprobs", -2), ("engine_restarts", -1), ("seed", 1 << 63)])
def test_engine_settings_that_cannot_be(field, value):
    with pytest.raises(UsageError, match=f"^--{field.replace('_', '-')} {value} is"):
        resolve(EngineArgs("m", **{field: value}), ModelFacts("m", 100, 10, ()))


@pytest.mark.parametrize("keyed", [False, True])
def test_the_printed_line_is_one_that_a_shell_understands(keyed):
    model = "".join(RNG.choices("ab'\"\\$` /é", k=12))
    line = example("http://127.0.0.1:1", model, keyed=keyed).splitlines()[0]
    program = f"{shlex.quote(sys.executable)} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    shell = line.replace("curl", program, 1)
    words = json.loads(subprocess.run(["sh", "-c", shell], capture_output=True, check=True).stdout)
    assert json.loads(words[-1])["model"] == model, f"OCTAVO_SEED={SEED}"
    assert ("Authorization: Bearer KEY" in words) == keyed
    assert words[0] == "http://127.0.0.1:1/v1/chat/completions"
