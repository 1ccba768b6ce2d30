"""The `octavo` command: a table of subcommands, each imported only when it is asked for.

So `octavo --help` is fast, and works where torch is missing or broken.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module

import click

import octavo
from octavo.tools.command import invoke

COMMANDS = {
    "serve": ("octavo.tools.serve:command", "Serve a model over an OpenAI-compatible API."),
    "run": ("octavo.tools.run:command", "Ask one question, or chat in the terminal."),
    "version": ("octavo.tools.version:command", "Show what is installed."),
}


class LazyGroup(click.Group):
    """Subcommands by `module:attribute`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = get_close_matches(name, COMMANDS, n=1)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(COMMANDS)}"
            raise click.UsageError(f"unknown command {name}; fix: {fix}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        print(f"octavo {octavo.__version__}")
        ctx.exit()


def _group() -> LazyGroup:
    epilog = "Start with `octavo run smollm2`; `octavo COMMAND --help` explains a command."
    version = click.Option(
        ["-v", "-V", "--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version,
        help="Show the version and exit.",
    )  # fmt: skip
    return LazyGroup(
        "octavo", help="Octavo serves large language models.", params=[version], epilog=epilog,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Ends the process with the command's exit code."""
    words = sys.argv[1:] if argv is None else argv
    sys.exit(invoke(_group(), words or ["--help"], "octavo"))
