"""`octavo run` with a real model: one question, and the chat in a terminal."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.terminal import Terminal

ROOT = Path(__file__).parents[2]
CODE = random.Random().choice(["A7K2", "Q9Z4", "M3X8"])


@pytest.fixture
def environment(tmp_path):
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}


@pytest.fixture
def command(smollm2_path):
    limits = ["--max-model-len", "1024", "--max-num-seqs", "4", "--threads", "1"]
    return [sys.executable, "-m", "octavo", "run", str(smollm2_path), *limits]


def test_a_question_is_answered_on_stdout_alone(command, environment):
    """As an argument, from a pipe, and as JSON: the same greedy answer."""
    greedy = ["--temperature", "0", "--max-tokens", "24"]
    question = f"Repeat this code: {CODE}"
    plain = subprocess.run([*command, *greedy, question], capture_output=True, text=True, env=environment, timeout=120)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.strip()
    assert "tokens/s" in plain.stderr
    both = subprocess.run(
        [*command, *greedy, "--json"], input=question, capture_output=True, text=True, env=environment, timeout=120
    )
    assert both.returncode == 0, both.stderr
    answer = json.loads(both.stdout)
    assert answer["text"] == plain.stdout.removesuffix("\n"), CODE
    assert answer["prompt"] == question
    assert 1 <= answer["completion_tokens"] <= 24
    assert answer["prompt_tokens"] > 10
    assert answer["finish_reason"] in ("stop", "length")
    assert answer["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--top-p", "3", "hello"], "top_p is 3"),
        (["--max-tokens", "1020", "hello"], "max_tokens is 1020 after"),
        (["  "], "the prompt is empty"),
        ([], "the prompt is empty"),
    ],
)
def test_a_bad_request_is_one_line(command, environment, words, says):
    result = subprocess.run(
        [*command, *words], capture_output=True, text=True, env=environment, timeout=120, stdin=subprocess.DEVNULL
    )
    assert (result.returncode, result.stdout) == (2, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("octavo: error: ")
    assert says in last
    assert "Traceback" not in result.stderr


def test_chat(command, environment, tmp_path):
    with Terminal([*command, "--temperature", "0", "--max-tokens", "40"], environment) as terminal:
        terminal.expect("/help lists commands", 120)
        terminal.expect(">>> ")
        terminal.send(f"My code is {CODE}.\n")
        assert "tokens/s" in terminal.expect("tokens/s") + terminal.expect(">>> ")
        terminal.send("one \\\n")
        terminal.expect("... ")
        terminal.send("two\n")
        terminal.expect("tokens/s")
        terminal.expect(">>> ")
        terminal.send('"""first\n')
        terminal.expect("... ")
        terminal.send('last"""\n')
        terminal.expect("tokens/s")
        terminal.expect(">>> ")
        terminal.send("/set temperature 0.7\n")
        terminal.expect("\ntemperature 0.7")
        terminal.send("/set temperature default\n")
        terminal.expect("\ntemperature 0.0")
        terminal.send("/set max_tokens none\n")
        terminal.expect("max_tokens must be a whole number, or default, and not 'none'")
        terminal.send("/set max_tokens 1024\n")
        terminal.expect("max_tokens is 1024; limit: 1024 tokens of context")
        terminal.send("/set top_p 7\n")
        terminal.expect("top_p is 7")
        terminal.send("/set colour blue\n")
        terminal.expect("usage: /set")
        terminal.send("/system Be brief.\n")
        terminal.expect("\nsystem: Be brief.")
        terminal.send("/clear\n")
        terminal.expect("forgotten; the system prompt stays")
        terminal.send("/system none\n")
        terminal.expect("\nsystem: (none)")
        terminal.send("/frobnicate\n")
        terminal.expect("unknown command")
        terminal.send("/exit\n")
        assert terminal.wait() == 0
    kept = (tmp_path / "octavo" / "history").read_text().split("\n")
    assert kept[:3] == [f"My code is {CODE}.", "one \\ntwo", "first\\nlast"], "one line a message"


def test_a_setting_that_cannot_work_ends_the_chat_before_it_begins(command, environment):
    with Terminal([*command, "--max-tokens", "99999"], environment) as terminal:
        terminal.expect("octavo: error: max_tokens is 99999; limit: 1024 tokens of context", 120)
        assert terminal.wait() == 2
        assert ">>>" not in terminal.shown


def test_keys_pressed_during_an_answer_wait_for_the_next_line(command, environment):
    with Terminal([*command, "--max-tokens", "60", "--temperature", "0"], environment) as terminal:
        terminal.expect(">>> ", 120)
        terminal.send("Write a long story about a lighthouse.\n")
        terminal.expect("\n")
        terminal.expect(" ")
        terminal.send("/set xyzzy")
        answer = terminal.expect("tokens/s")
        assert "xyzzy" not in answer
        assert "xyzzy" in terminal.expect(">>> ") + terminal.expect("xyzzy")
        terminal.send("\n")
        terminal.expect("usage: /set")
        terminal.expect(">>> ")
        terminal.send("\x04")
        assert terminal.wait() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(command, environment):
    with Terminal([*command, "--max-tokens", "900", "--temperature", "0"], environment) as terminal:
        terminal.expect(">>> ", 120)
        terminal.send("half a line")
        terminal.expect("half a line")
        terminal.interrupt("\n>>> ")
        terminal.send("Write a very long story about a lighthouse.\n")
        terminal.expect("\n")
        terminal.expect(" ")
        terminal.send("\x03")
        assert "[stopped]" in terminal.expect("tokens/s", 20)
        terminal.expect(">>> ")
        terminal.send("/set max_tokens 8\n")
        terminal.expect("\nmax_tokens 8")
        terminal.expect(">>> ")
        terminal.send("Hello!\n")
        terminal.expect("first after", 30)
        terminal.expect(">>> ")
        terminal.send("\x1b[A")
        terminal.expect("Hello!")
        terminal.interrupt("\n>>> ")
        terminal.send("\x04")
        assert terminal.wait() == 0
