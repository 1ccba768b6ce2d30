"""`python -m octavo.entrypoints.api_server --model M …`: today's server, with the old `/generate` besides."""

from __future__ import annotations

import sys

from octavo.tools.program import begin


def main(argv: list[str]) -> int:
    begin()
    from octavo.entrypoints.old_command import run
    from octavo.tools.serve import make

    return run(make(old_generate=True), argv, "python -m octavo.entrypoints.api_server")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
