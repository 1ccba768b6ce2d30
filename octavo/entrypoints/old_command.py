"""Starts today's server from a command line written for an older one, saying what changed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import click

from octavo.errors import UsageError
from octavo.tools.command import exit_code_of, invoke
from octavo.tools.old_flags import Translation, translate
from octavo.tools.program import complain


def run(command: click.Command, argv: Sequence[str], name: str) -> int:
    """Exit code of `command`, given an old command line. Writes one line a changed flag to stderr."""
    if "--help" in argv or "-h" in argv:
        return invoke(command, ["--help"], name)
    return exit_code_of(lambda: _run(command, argv, name))


def _run(command: click.Command, argv: Sequence[str], name: str) -> Any:
    translation = translate(argv)
    if not translation.has_model and "--config" not in argv:
        raise UsageError("--model is missing", fix="name one, such as --model smollm2", param="model")
    with command.make_context(name, list(translation.argv)) as context:
        _advise(translation, name)
        return command.invoke(context)


def _advise(translation: Translation, name: str) -> None:
    """Warnings come last, because those of today's command follow."""
    if "--host" not in [word.partition("=")[0] for word in translation.argv]:
        complain("octavo: note: listens on 127.0.0.1 only; for other machines give --host 0.0.0.0")
    complain(f"octavo: note: {name} is today: octavo serve {shlex.join(_shown(translation.argv))}")
    for line in translation.warnings:
        complain(f"octavo: warning: {line}")


def _shown(argv: Sequence[str]) -> list[str]:
    """The arguments, without the keys in them."""
    shown = list(argv)
    for i, word in enumerate(argv):
        if word.startswith("--api-key="):
            shown[i] = "--api-key=***"
        elif i and argv[i - 1] == "--api-key":
            shown[i] = "***"
    return shown
