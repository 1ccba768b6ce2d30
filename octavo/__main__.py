"""The `octavo` command, also as `python -m octavo`."""

from __future__ import annotations

from octavo.tools.program import begin


def main() -> None:
    """Console entry point; ends the process with the command's exit code."""
    begin()
    from octavo.cli import main as run

    run()


if __name__ == "__main__":
    main()
