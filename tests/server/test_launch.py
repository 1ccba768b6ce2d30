"""What the launcher refuses, and what it prints."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys

import msgspec
import pytest

from octavo.config import MAX_PORT, EngineArgs, ModelFacts, ServerArgs, resolve
from octavo.engine.messages import EngineFacts
from octavo.errors import UsageError
from octavo.server.launch import example, serve, unusual
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


def test_what_is_unusual_is_named():
    plain = EngineFacts(1, "cpu", "bfloat16", "avx2", 10, 16, 100, 1, 1, 1.0, "bfloat16", prefix_caching=True)
    quantized = msgspec.structs.replace(plain, kv_cache_dtype="int8", prefix_caching=False)
    guesses = {"method": "ngram", "num_speculative_tokens": 3}

    def said(facts, adapters=0, **settings):
        config = resolve(EngineArgs("m", **settings), ModelFacts("m", 100, 10, ()))
        return ", ".join(unusual(config, facts, adapters))

    assert said(plain) == ""
    assert said(quantized) == "KV cache in int8, no prefix cache"
    tiers = said(plain, kv_offloading_size=1.5, kv_offloading_dir="/x/y", kv_offloading_dir_size=4)
    assert tiers == "1.5 GiB of host memory for KV blocks, 4 GiB for them in /x/y"
    assert said(plain, async_scheduling=True) == "overlapped loop"
    assert said(msgspec.structs.replace(plain, asynchronous=True)) == "overlapped loop"
    overlapped = msgspec.structs.replace(plain, asynchronous=True)
    assert said(overlapped, speculative_config=guesses) == "3 tokens guessed ahead by ngram"
    assert said(plain, 2, enable_lora=True, max_loras=5) == "adapters (2 of at most 5 loaded)"


def test_a_folder_of_an_adapter_that_is_not_there_is_refused_before_the_weights(capsys, smollm2_path, tmp_path):
    modules = (f"foo={tmp_path}/nope",)
    assert serve(EngineArgs(str(smollm2_path), lora_modules=modules), ServerArgs(port=0)) == 2
    said = capsys.readouterr().err
    assert f"--lora-modules foo={tmp_path}/nope: no such folder; fix: give the folder" in said
