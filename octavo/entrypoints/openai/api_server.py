"""`python -m octavo.entrypoints.openai.api_server --model M …`: the old name of `octavo serve M …`."""

from __future__ import annotations

import sys

from octavo.tools.program import begin


def main(argv: list[str]) -> int:
    begin()
    from octavo.entrypoints.old_command import run
    from octavo.tools.serve import command

    return run(command, argv, "python -m octavo.entrypoints.openai.api_server")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
