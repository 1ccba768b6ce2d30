"""`octavo version`: what is installed, found without importing it."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version

import click

import octavo
from octavo.tools.command import Command


def versions() -> dict[str, str | None]:
    """Version of each part; None where it is not installed."""
    found: dict[str, str | None] = {"octavo": octavo.__version__, "python": platform.python_version()}
    for package in ("torch", "torch-npu", "tokenizers", "gguf"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["platform"] = f"{platform.system()} {platform.machine()}"
    return found


def show(as_json: bool) -> None:
    found = versions()
    if as_json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:<12}{value or 'not installed'}" for name, value in found.items()))


command = Command(
    "version", "octavo version\noctavo version --json", callback=show, short_help="Show what is installed.",
    help="Shows the versions of Octavo and of what it stands on.",
    params=[click.Option(["--json", "as_json"], is_flag=True, help="One JSON object.")],
)  # fmt: skip
