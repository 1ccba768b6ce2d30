"""`octavo serve` over the null engine: the real server and engine loop without a model, to test what goes wrong."""

from __future__ import annotations

import sys

from octavo.cli import main
from octavo.engine.client import EngineClient
from octavo.tools.program import begin

if __name__ == "__main__":
    begin()
    EngineClient.start.__func__.__kwdefaults__["program"] = (sys.executable, "-m", "tests.engine.null_engine")
    sys.exit(main(["serve", *sys.argv[1:]]))
