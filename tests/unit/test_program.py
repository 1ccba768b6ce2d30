"""Streams that are closed or full, and Ctrl-C at any moment: an exit code, and never a stack trace."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_cli import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
CLOSED = [subset for n in range(1, 4) for subset in itertools.combinations(("<&-", ">&-", "2>&-"), n)]


def shell(words: str, redirections: str) -> subprocess.CompletedProcess[str]:
    line = f'"$0" -m {words} {redirections}'
    return subprocess.run(
        ["bash", "-c", line, sys.executable], capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False
    )


@pytest.mark.parametrize("closed", CLOSED, ids=" ".join)
@pytest.mark.parametrize(("words", "code"), [
    ("octavo version", 0), ("octavo serve no-such-model --port 0", 2), ("octavo run no-such-model hi", 2),
    ("octavo.entrypoints.api_server --model no-such-model --port 0", 2),
])  # fmt: skip
def test_closed_streams_change_nothing_but_what_is_seen(words, code, closed):
    result = shell(words, " ".join(closed))
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert bool(result.stdout) == (code == 0 and ">&-" not in closed)
    assert ("no model is called" in result.stderr) == (code == 2 and "2>&-" not in closed)


def test_a_stream_of_ours_is_never_another_file():
    """With stderr closed, the first file opened would have its number, and get what is printed."""
    code = "from octavo.tools.program import begin; begin(); print(open('/dev/null').fileno() > 2)"
    result = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" <&- 2>&-', sys.executable, code], capture_output=True, text=True, env=ENVIRONMENT,
        check=False,
    )  # fmt: skip
    assert result.stdout == "True\n"


@pytest.mark.parametrize(("words", "redirection", "code"), [
    ("octavo version", ">/dev/full", 1), ("octavo --help", ">/dev/full", 1), ("octavo version", "2>/dev/full", 0),
    ("octavo run no-such-model hi", "2>/dev/full", 2), ("octavo version --no-such-flag", "&>/dev/full", 2),
    ("octavo.entrypoints.api_server --frobnicate", "2>/dev/full", 2),
])  # fmt: skip
def test_full_streams(words, redirection, code):
    result = shell(words, redirection)
    assert result.returncode == code, result.stderr
    assert result.stderr == ("octavo: error: No space left on device\n" if code == 1 else "")


@pytest.mark.parametrize(("module", "words", "imported"), [
    ("octavo", ["version"], "click"), ("octavo", ["serve", "m"], "uvicorn"), ("octavo", ["run", "m", "hi"], "msgspec"),
    ("octavo.entrypoints.api_server", ["--model", "m"], "click"),
    ("octavo.entrypoints.openai.api_server", ["--model", "m"], "uvicorn"),
])  # fmt: skip
def test_ctrl_c_while_something_is_imported(tmp_path: Path, module: str, words: list[str], imported: str):
    (tmp_path / f"{imported}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        [sys.executable, "-m", module, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(("stdin", "says"), [
    ("/dev/zero", "the prompt on stdin is too large"), ("<(printf 'a\\xff')", "the prompt on stdin is no text"),
    ("/dev/null", "the prompt is empty"), ("<(printf 'a\\r\\n')", "no model is called"),
])  # fmt: skip
def test_prompts_on_stdin(stdin, says):
    result = shell("octavo run no-such-model", f"< {stdin}")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert says in result.stderr


def test_what_the_output_cannot_show_is_escaped():
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    code = "from octavo.tools.program import begin; begin(); print('é')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout == "\\xe9\n"
