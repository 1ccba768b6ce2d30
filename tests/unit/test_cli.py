"""The command line: quick to start, independent of torch, exact in what it refuses."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest

from octavo.backends.base import open_device
from octavo.backends.names import COMPUTED_AS
from octavo.cli import COMMANDS
from octavo.config import EngineArgs, ServerArgs
from octavo.errors import DeviceUnavailable, UsageError
from octavo.server.args import FLAGS, collect, options, size
from octavo.tools.command import Command

ROOT = Path(__file__).parents[2]


def octavo(*words: str, path: Path | None = None, module: str = "octavo") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )


def parse(*words: str) -> tuple[EngineArgs, ServerArgs]:
    """What `octavo serve WORDS` would start with."""
    found = []
    params = [click.Argument(["model"]), *options([EngineArgs, ServerArgs])]
    command = Command("serve", "", params=params, callback=lambda **given: found.append(collect(given)))
    command.main(list(words), standalone_mode=False)
    return found[0]


@pytest.fixture
def broken_torch(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch.so: cannot open shared object file')\n")
    return tmp_path


def test_help_imports_little():
    """A stand-in for its time, which a busy machine would disturb: what it imports beyond Python itself."""
    code = "import sys; before = set(sys.modules); import octavo.cli; print(*(set(sys.modules) - before))"
    loaded = set(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.split())
    heavy = ("torch", "numpy", "fastapi", "starlette", "pydantic", "rich", "tokenizers", "zmq", "msgspec", "yaml")
    assert "octavo.cli" in loaded
    assert not [m for m in loaded if m.split(".")[0] in heavy]
    assert {m for m in loaded if m.startswith("octavo.")} < {
        "octavo.cli", "octavo.errors", "octavo.tools", "octavo.tools.command", "octavo.tools.old_flags",
        "octavo.tools.program",
    } | {"octavo"}  # fmt: skip
    assert len(loaded) < 200


@pytest.mark.parametrize("words", [["--help"], [], ["-v"], ["version"], *[[name, "--help"] for name in COMMANDS]])
def test_help_and_version_work_where_torch_is_broken(broken_torch, words):
    result = octavo(*words, path=broken_torch)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert result.stderr == ""


def test_help_of_the_group_lists_every_command_and_each_has_examples():
    listed = octavo("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in listed
        assert f"octavo {name}" in octavo(name, "--help").stdout.split("Examples:")[1]


def test_version_as_json_is_one_object():
    assert json.loads(octavo("version", "--json").stdout)["octavo"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serv"], "did you mean serve?"),
        (["frobnicate"], "unknown command frobnicate"),
        (["--frobnicate"], "unknown flag --frobnicate"),
        (["serve"], "MODEL"),
        (["serve", "m", "surplus"], "surplus"),
        (["run", "m", "What", "is", "this?"], "the prompt is 3 arguments; limit: one; fix: put it between quotes"),
        (["run", "m", "--engine-restarts", "1"], "unknown flag --engine-restarts"),
        (["serve", "--model", "m"], "octavo serve MODEL"),
        (["serve", "m", "--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        (["serve", "m", "--max-num-seqs", "many"], "--max-num-seqs many cannot be used; limit: a whole number, 1 to"),
        (
            ["serve", "m", "--kv-offloading-size", "abc"],
            "size abc cannot be used; limit: a number, 0 to 1048576",
        ),
        (["serve", "m", "--scheduling-policy", "sjf"], "sjf cannot be used; limit: fcfs, priority; fix: choose one"),
        (["serve", "m", "-tp", "two"], "--tensor-parallel-size two cannot be used; limit: a whole number, 1 to 64"),
        (["run", "m", "--top-k", "1.5"], "--top-k 1.5 cannot be used; limit: a whole number; fix: give such a number"),
        (["serve", "m", "--max-model-len", "0.3"], "32k (32,000)"),
        (["serve", "m", "--dtype", "int3"], "--dtype int3 cannot be used; limit: auto, float32"),
        (["serve", "m", "--preemption-mode", "swap"], "outdated flag --preemption-mode; fix: a preempted sequence is"),
        (["serve", "m", "--paged-attention-block-size", "8"], "use --block-size"),
        (["serve", "m", "--device", "npu"], "use --device cpu"),
        (["serve", "m", "--device", "abacus"], "one of auto, cpu"),
        (["serve", "m", "--config", "no-such-file.yaml"], "no-such-file.yaml"),
        (["serve", "m", "--chat-template", "no-such-file.jinja"], "no-such-file.jinja"),
        (["version", "--yaml"], "unknown flag --yaml"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(words, says):
    result = octavo(*words)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("octavo: error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


def test_every_setting_has_exactly_one_flag():
    settable = [flag.field for group in FLAGS.values() for flag in group]
    assert len(settable) == len(set(settable))
    assert set(settable) == {f.name for owner in (EngineArgs, ServerArgs) for f in fields(owner)} - {"model"}


def test_defaults_are_those_of_the_dataclasses():
    assert parse("m") == (EngineArgs("m"), ServerArgs())


def test_each_value_reaches_its_field():
    count = random.randrange(2, 1 << 20)
    engine, server = parse(
        "m", "--max_num_seqs", f"{count}", "--max-num-batched-tokens=12K", "-tp", "2", "--dtype", "float",
        "--seed", "0", "--device-memory-utilization", "0.5", "--served-model-name", "a", "--served-model-name", "b",
        "--port", "0",
        "--api-key", "k1", "--api-key", "k2", "--enable-log-requests", "--allowed-origins", '["http://x", "http://y"]',
        "--chat-template", "{{ messages[0].content }}", "--shutdown-timeout", "2.5", "--uvicorn-log-level", "debug",
    )  # fmt: skip
    assert engine == EngineArgs(
        "m", max_num_seqs=count, max_num_batched_tokens=12288, tensor_parallel_size=2, dtype="float",
        gpu_memory_utilization=0.5, served_model_name=("a", "b"), chat_template="{{ messages[0].content }}",
    ), count  # fmt: skip
    assert server == ServerArgs(
        port=0, api_keys=("k1", "k2"), log_requests=True, allowed_origins=("http://x", "http://y"),
        shutdown_timeout_s=2.5, log_level="debug",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "dtype", "said"),
    [
        (["--dtype", "half"], "bfloat16", "--dtype half: the CPU computes in bfloat16 instead"),
        (["--dtype", "float16", "--device", "cpu"], "bfloat16", "the device cpu computes in bfloat16 instead"),
        (["--dtype", "half", "--device", "reference"], "half", ""),
        (["--dtype", "float"], "float", ""),
        ([], "auto", ""),
    ],
)
def test_a_dtype_that_the_device_lacks_is_replaced_with_a_warning(capsys, words, dtype, said):
    assert parse("m", *words)[0].dtype == dtype
    warned = capsys.readouterr().err
    assert said in warned
    assert warned.startswith("octavo: warning: ") == bool(said)


def test_a_dtype_that_is_replaced_is_known_to_be_lacking():
    """So that the table of names says what the devices themselves do."""
    for (name, dtype), computed in COMPUTED_AS.items():
        dtypes = [str(known).removeprefix("torch.") for known in open_device(name, threads=1).dtypes]
        assert dtype not in dtypes
        assert computed in dtypes


def test_a_chat_template_may_be_a_file(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ 1 }}é", encoding="utf-8")
    assert parse("m", "--chat-template", str(tmp_path / "t.jinja"))[0].chat_template == "{{ 1 }}é"


def test_api_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "from-environment")
    assert parse("m")[1].api_keys == ("from-environment",)
    assert parse("m", "--api-key", "x")[1].api_keys == ("x",)


@pytest.mark.parametrize("text", ["port: {port}\nmax-num-seqs: 7\napi_key: [a, b]\nserved-model-name: one\n"
                                  "max_model_len: 2k\nenable-log-requests: true\n",
                                  '{{"port": {port}, "max_num_seqs": 7, "api-key": ["a", "b"], "max-model-len": 2000,'
                                  '"served_model_name": "one", "enable_log_requests": true}}'])  # fmt: skip
def test_a_config_file_sets_what_the_command_line_does_not(tmp_path, text):
    port = random.randrange(1024, 1 << 16)
    (tmp_path / "c.yaml").write_text(text.format(port=port))
    engine, server = parse("m", "--config", str(tmp_path / "c.yaml"), "--max-num-seqs", "9")
    assert engine == EngineArgs("m", max_num_seqs=9, max_model_len=2000, served_model_name=("one",))
    assert server == ServerArgs(port=port, api_keys=("a", "b"), log_requests=True)


def test_a_config_file_may_name_the_model(tmp_path):
    (tmp_path / "c.yaml").write_text("model: from-file")
    assert parse("--config", str(tmp_path / "c.yaml"))[0].model == "from-file"


@pytest.mark.parametrize("text", ["max-num-sequences: 3", "- a", "a: [", "config: other.yaml", "preemption-mode: swap"])
def test_a_bad_config_file_is_refused(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"c\.yaml"):
        parse("m", "--config", str(tmp_path / "c.yaml"))


def test_an_absent_device_is_refused_before_anything_loads():
    with pytest.raises(DeviceUnavailable):
        parse("no-such-model", "--device", "npu")


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("2k", 2000), ("2K", 2048), ("1.5K", 1536), ("3m", 3 * 10**6), ("1G", 1 << 30), (8, 8)],
)
def test_size(text, value):
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "x", "1kk", "1e999", "nan", "inf"])
def test_size_refuses(text):
    with pytest.raises(click.BadParameter):
        size(text)
