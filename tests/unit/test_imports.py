"""Imports point down only, torch stays out of the rooms that must work without it, vendors stay in their folders."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "octavo"
LAYERS = (
    ("errors",), ("config", "clock"), ("formats",), ("text", "hub", "wire"), ("backends",), ("quant", "dist"),
    ("layers",), ("models",), ("engine",), ("server",), ("tools",), ("cli", "entrypoints"), ("__main__",),
)  # fmt: skip
"""Rooms from the ground up, as docs/architecture.md draws them. Rooms on one level do not see each other."""
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
WITH_TORCH = (
    "models/lora_loader.py",
    "backends",
    "dist",
    "engine/batch.py",
    "engine/block_store.py",
    "engine/draft_model.py",
    "engine/executor.py",
    "engine/fingerprint.py",
    "engine/logit_changes.py",
    "engine/logprobs.py",
    "engine/penalties.py",
    "engine/runner.py",
    "engine/sampler.py",
    "engine/sizing.py",
    "engine/worker.py",
    "layers",
    "models/decoder.py",
    "models/loader.py",
    "models/rope.py",
    "models/simulated.py",
    "quant",
)
"""Where torch may be imported, but for those below."""
TORCH_FREE_ANYWAY = (
    "backends/__init__.py", "backends/kv.py", "backends/names.py", "backends/sim/__init__.py",
    "backends/sim/profiles.py",
)  # fmt: skip
VENDORS = ("torch_npu", "acl", "torchair", "pynvml", "triton")
FILES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    """The room of a module of ours; None for the package itself, which is lazy and holds only names."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, also those in functions and those for type checking only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports from the root"
            assert node.module is not None
            yield node.module, node.lineno
            if node.module == "octavo":
                for alias in node.names:
                    if (PACKAGE / alias.name).is_dir() or (PACKAGE / f"{alias.name}.py").exists():
                        yield f"octavo.{alias.name}", node.lineno


def may_hold_torch(path: Path) -> bool:
    name = relative(path)
    return name not in TORCH_FREE_ANYWAY and any(name == p or name.startswith(f"{p}/") for p in WITH_TORCH)


def test_the_levels_are_those_of_the_document():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = re.search(r"^`(.+ → errors)`\.$", text, re.MULTILINE)
    assert drawn
    levels = [tuple(sorted(re.findall(r"\w+", level))) for level in drawn[1].split("→")]
    assert levels[::-1] == [tuple(sorted(rooms)) for rooms in LAYERS[:-1]]


def test_every_room_has_a_level():
    rooms = {room for path in FILES if (room := room_of(module_name(path)))}
    assert rooms <= set(LEVEL), "add the new room to docs/architecture.md and to LAYERS"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_down(path):
    own = room_of(module_name(path))
    if own is None:
        return
    for module, line in imports(path):
        other = room_of(module) if module.split(".")[0] == "octavo" else None
        if other is not None and other != own:
            assert LEVEL[other] < LEVEL[own], f"{relative(path)}:{line}: {own} must not import {module}"


def test_the_top_package_imports_nothing_of_ours_at_once():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    at_once = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not [n for n in at_once if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("octavo")]


def test_no_import_cycles():
    """Between modules, counting only what runs when a module is loaded."""
    graph: dict[str, set[str]] = {}
    ours = {module_name(path) for path in FILES}
    for path in FILES:
        found = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[module_name(path)] = (found & ours) - {"octavo", module_name(path)}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for other in graph[module]:
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_packages_are_empty():
    assert not [relative(p) for p in FILES if p.name == "__init__.py" and p.parent != PACKAGE and p.stat().st_size]


@pytest.mark.parametrize("path", [p for p in FILES if not may_hold_torch(p)], ids=relative)
def test_torch_is_named_only_where_it_may_be(path):
    assert not [f"{relative(path)}:{line}" for module, line in imports(path) if module.split(".")[0] == "torch"]


@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_torch_free_rooms_load_without_torch(tmp_path, damage):
    error = "ModuleNotFoundError('No module named torch', name='torch')" if damage == "missing" else "OSError('broken')"
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    modules = [module_name(p) for p in FILES if not may_hold_torch(p) and p.name != "__main__.py"]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *modules], capture_output=True, text=True, env=environment,
        timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_vendors_are_named_only_in_their_folder(path):
    parts = path.relative_to(PACKAGE).parts
    if parts[0] == "backends" and len(parts) > 2:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        named = None
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            named = next((m for m in modules if m.split(".")[0] in VENDORS or m.startswith("torch.cuda")), None)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.cuda", "torch.npu"):
            named = ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in VENDORS:
            named = str(node.value)
        assert named is None, f"{relative(path)}:{node.lineno}: {named} belongs in octavo/backends/<device>/"
