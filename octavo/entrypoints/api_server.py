"""`python -m octavo.entrypoints.api_server --model M …`: today's server, with the old `/generate` besides."""

from __future__ import annotations

import sys

from octavo.entrypoints.old_command import run
from octavo.tools.serve import make


def main(argv: list[str]) -> int:
    return run(make(old_generate=True), argv, "python -m octavo.entrypoints.api_server")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
