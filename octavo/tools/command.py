"""What all commands share: help in groups with examples, and errors as one line with the right exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

import click

from octavo.errors import OctavoError
from octavo.tools.old_flags import hint
from octavo.tools.program import INTERRUPTED, complain, settle


class Command(click.Command):
    """A command whose options stand under headings and whose examples come first. `--max_num_seqs` is understood."""

    def __init__(self, name: str, examples: str, **settings: Any) -> None:
        context = {"token_normalize_func": lambda text: text.replace("_", "-"), "help_option_names": ["-h", "--help"]}
        super().__init__(name, context_settings={**context, "max_content_width": 110}, **settings)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in self.examples.strip().splitlines():
                formatter.write(f"  {line.strip()}\n")
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=36)


def invoke(command: click.Command, argv: Sequence[str], name: str) -> int:
    """Runs a command and returns its exit code, see `exit_code_of`."""
    return exit_code_of(lambda: command.main(list(argv), prog_name=name, standalone_mode=False))


def exit_code_of(work: Callable[[], Any]) -> int:
    """Of what a command does: 2 for what the user can correct, 130 when interrupted."""
    try:
        code = work()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except OctavoError as error:
        complain(f"octavo: error: {error}")
        return error.exit_code
    except click.ClickException as error:
        complain(f"octavo: error: {_describe(error)}")
        return 2
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return 1
    except OSError as error:  # such as a full disk under stdout
        named = f": {error.filename}" if error.filename else ""
        complain(f"octavo: error: {error.strerror or error}{named}")
        return 1
    finally:
        settle()


def _describe(error: click.ClickException) -> str:
    """Cause and fix in one line."""
    context = getattr(error, "ctx", None)
    see = f" ({context.command_path} --help lists all)" if context is not None else ""
    if isinstance(error, click.NoSuchOption):
        instead = hint(error.option_name)
        if instead:
            return f"outdated flag {error.option_name}; fix: {instead}{see}"
        near = get_close_matches(error.option_name, error.possibilities or (), n=1)
        return f"unknown flag {error.option_name}{f'; fix: did you mean {near[0]}?' if near else ''}{see}"
    return " ".join(error.format_message().split()) + see
