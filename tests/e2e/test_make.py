"""The Makefile's promises that need no network: clear errors, and nothing done twice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VARIABLES = {"PYTHON", "TORCH", "MODEL", "PORT", "ARGS", "PART"}
"""of the Makefile; what this run was given must not reach the runs inside the tests"""
STAMPS = ("python", "torch", "build-tools", "runtime", "dev")


def make(where: Path, *words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES and not k.startswith("MAKE")}
    environment["PATH"] = path or environment["PATH"]
    command = [str(shutil.which("make")), *words]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def project(tmp_path):
    """A project as after `make dev`: each stamp newer than what it depends on."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    (tmp_path / "csrc" / "cpu" / "kernel.cpp").touch()
    (tmp_path / ".make").mkdir()
    past = time.time() - 100
    for path in (tmp_path / "pyproject.toml", tmp_path / "csrc" / "cpu" / "kernel.cpp"):
        os.utime(path, (past, past))
    for second, name in enumerate(STAMPS, 1):
        stamp = tmp_path / ".make" / name
        stamp.touch()
        os.utime(stamp, (past + second, past + second))
    return tmp_path


def test_help_names_every_target():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    shown = make(ROOT, "help").stdout
    for target in set(targets[1].split()) - {"help", "dev"}:
        assert f"make {target} " in shown


def test_what_is_done_is_not_done_again(project):
    assert make(project, "-q", "setup", "dev").returncode == 0


@pytest.mark.parametrize("changed", ["csrc/cpu/kernel.cpp", "csrc/cpu/new.h", "pyproject.toml"])
def test_a_changed_source_is_installed_again_and_torch_is_not(project, changed):
    path = project / changed
    path.touch()
    assert make(project, "-q", "setup").returncode == 1
    assert make(project, "-q", ".make/torch").returncode == 0
    planned = make(project, "-n", "setup").stdout
    assert "--no-build-isolation -e ." in planned
    assert "import torch" not in planned


def test_an_old_or_missing_python_is_named(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    result = make(tmp_path, "setup", "PYTHON=no-such-python")
    assert result.returncode == 2
    assert result.stderr.startswith("error: no-such-python is missing or older than 3.10; fix: make PYTHON=")
    assert not (tmp_path / ".venv").exists()


def test_a_missing_compiler_is_named(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "find", "mkdir", "touch"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    python = os.path.realpath(sys.executable)
    result = make(tmp_path, "setup", f"PYTHON={python}", path=str(tools))
    assert result.returncode == 2
    assert "no C++ compiler; fix: install one" in result.stderr


def environment_python(project: Path, script: str) -> None:
    """What stands at .venv/bin/python."""
    python = project / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


@pytest.mark.parametrize("word", ["PYTHON=no-such-python", "TORCH=torch==1.2.3", "TORCH=./torch.whl"])
def test_another_python_or_torch_than_the_installed_one_is_refused(project, word):
    environment_python(project, f'exec "{sys.executable}" "$@"')
    result = make(project, "setup", word)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert word in result.stderr.splitlines()[0]
    assert "fix: " in result.stderr.splitlines()[0]


@pytest.mark.parametrize("word", [f"PYTHON={sys.executable}", "TORCH=torch>=2.5"])
def test_the_installed_python_and_torch_may_be_named(project, word):
    environment_python(project, f'exec "{sys.executable}" "$@"')
    result = make(project, "setup", word)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("step", ["torch", "build-tools", "runtime", "dev"])
def test_when_pip_fails_the_cause_and_the_fix_follow(project, step):
    environment_python(project, 'echo "ERROR: No matching distribution found" >&2; exit 1')
    (project / ".make" / step).unlink()
    result = make(project, f".make/{step}")
    assert result.returncode == 2
    reason, ours = result.stderr.splitlines()[:2]
    assert reason == "ERROR: No matching distribution found"
    assert ours.startswith("error: pip could not install ")
    assert "fix: if its index cannot be reached, check the network" in ours
    assert not (project / ".make" / step).exists()


def test_clean_leaves_only_sources(project):
    for place in ("octavo/backends/__pycache__", "tests/unit/__pycache__", "bench", ".venv/bin", "build"):
        (project / place).mkdir(parents=True)
        (project / place / "made").touch()
    (project / "octavo" / "backends" / "lib.so").touch()
    assert make(project, "clean").returncode == 0
    left = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    assert left == {"Makefile", "pyproject.toml", "csrc/cpu/kernel.cpp", "bench/made"}


def test_the_full_run_resumes(tmp_path):
    """A file that passed is not run again until a source changes; one that failed is."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "full.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_good.py").write_text("def test_it():\n    assert True\n")
    (tmp_path / "tests" / "test_bad.py").write_text(
        "from pathlib import Path\ndef test_it():\n    assert (Path(__file__).parent.parent / '.make/go').exists()\n"
    )
    (tmp_path / ".gitignore").write_text("/.make/\n__pycache__/\n.pytest_cache/\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)

    def full(*parts: str) -> tuple[int, str]:
        command = [sys.executable, str(tmp_path / "tests" / "full.py"), *parts]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return result.returncode, result.stdout

    code, text = full()
    assert code == 1
    assert text.rstrip().endswith("1 of 2 files passed\nfailed: tests/test_bad.py")
    (tmp_path / ".make" / "go").touch()
    code, text = full()
    assert (code, text.count("passed before")) == (0, 1)
    assert "tests/test_good.py: passed before" in text
    assert full("tests/test_bad")[1].count("passed before") == 1
    (tmp_path / "tests" / "test_good.py").write_text("def test_it():\n    assert 1\n")
    code, text = full()
    assert (code, text.count("passed before")) == (0, 0)
    assert full("tests/nothing")[0] == 1


def test_the_demo_shows_an_answer_and_its_speed(smollm2_path):
    """What `make demo` runs once all is installed."""
    command = [
        sys.executable,
        "-m",
        "octavo.tools.demo",
        str(smollm2_path),
        "--threads",
        "1",
        "--max-model-len",
        "1024",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    asked, shown = result.stdout.split("> Explain", 1)
    assert "curl http://127.0.0.1:" in asked
    assert len(shown.split("\n\n")[1]) > 20
    assert re.search(r"\[\d+ tokens, [\d.]+ tokens/s, first after [\d.]+ s\]\n$", shown)


def test_a_demo_without_a_model_fails(tmp_path):
    command = [sys.executable, "-m", "octavo.tools.demo", str(tmp_path / "none.gguf")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("octavo: error: ")
    assert "none.gguf" in result.stderr
