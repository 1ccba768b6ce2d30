"""What holds for the project as a whole: sizes, words, and that what the documents name exists."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from octavo.cli import COMMANDS
from octavo.server.args import FLAGS
from tests.unit.test_cli import octavo

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
LONGER: dict[str, str] = {}
"""`file` or `file:function` that may be longer, and why."""
READMES = ("README.md", "README.zh.md")


def tracked() -> list[Path]:
    """Files that git has or would add; all files where this is no git checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split("\0") if listed.returncode == 0 else [str(p) for p in ROOT.rglob("*.py")]
    return [path for name in names if name and (path := ROOT / name).is_file()]


PYTHON = [p for p in tracked() if p.suffix == ".py" and p.is_relative_to(ROOT / "octavo")]


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_functions_are_short(path):
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MAX_FILE_LINES or name in LONGER, f"{name} has {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES or f"{name}:{node.name}" in LONGER, f"{name}:{node.name} has {length}"


def test_no_machine_paths_registries_or_leftovers():
    """Built from halves, so that this file does not find itself."""
    words = [r"/wo" r"rk/", r"/opt/py" r"pi", r"/ho" r"me/\w", r"/ro" r"ot/", r"py" r"pi\.org", r"pythonho" r"sted",
             r"\bTO" r"DO\b", r"\bFIX" r"ME\b", r"\bXX" r"X\b"]  # fmt: skip
    pattern = re.compile("|".join(words))
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {m.group()}" for m in pattern.finditer(text)]
    assert not found


def commands_in(name: str) -> list[str]:
    """Lines of the shell blocks of a document, without comments and with continuations joined."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [line for raw in text.splitlines() if (line := re.sub(r"(^|\s)#.*", "", raw).strip())]


@pytest.mark.parametrize("name", READMES)
def test_commands_in_the_readme_exist(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    flags = {word for group in FLAGS.values() for flag in group for word in flag.names.split()}
    lines = commands_in(name)
    seen = set()
    for line in lines:
        words = shlex.split(line)
        if words[0] == "make":
            chosen = [w for w in words[1:] if "=" not in w and not w.startswith("-")]
            assert set(chosen) <= targets, line
            seen |= {f"make {w}" for w in chosen}
        elif words[0] == "octavo":
            assert words[1] in COMMANDS, line
            seen.add(f"octavo {words[1]}")
            used = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
            assert used <= flags or words[1] != "serve", line
    assert {"make serve", "make demo", "make test", "octavo serve", "octavo run"} <= seen


def test_both_readmes_show_the_same_commands():
    english, chinese = (commands_in(name) for name in READMES)
    assert english == chinese


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_in_the_help_parse(command):
    """Every flag that an example uses is one of the command's own."""
    text = octavo(command, "--help").stdout
    examples, rest = text.split("Examples:")[1].split("\n\n", 1)
    used = set(re.findall(r"--[a-z][a-z-]*", examples))
    assert used <= set(re.findall(r"--[a-z][a-z-]*", rest))


def test_documents_link_to_files_that_exist():
    for path in [ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
