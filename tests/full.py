"""`make test-full`: every matrix whole, one test file after another, resuming after an interruption.

Files that passed are remembered in .make/full.json for exactly this state of the sources; a change starts anew.
Arguments select test files by path prefix.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MEMORY = ROOT / ".make" / "full.json"
NO_TESTS = 5


def state_of_sources() -> str:
    """A hash over the content of all files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    digest = hashlib.sha256()
    for name in sorted(set(listed.decode().split("\0")) - {""}):
        path = ROOT / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def main(parts: list[str]) -> int:
    state = state_of_sources()
    memory = json.loads(MEMORY.read_text()) if MEMORY.exists() else {}
    passed: list[str] = memory.get("passed", []) if memory.get("state") == state else []
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py"))
    chosen = [f for f in files if not parts or any(f.startswith(part.rstrip("/")) for part in parts)]
    failed = []
    for number, name in enumerate(chosen, 1):
        if name in passed:
            print(f"[{number}/{len(chosen)}] {name}: passed before", flush=True)
            continue
        print(f"[{number}/{len(chosen)}] {name}", flush=True)
        code = subprocess.run([sys.executable, "-m", "pytest", name], cwd=ROOT, check=False).returncode
        if code in (0, NO_TESTS):
            passed.append(name)
            MEMORY.parent.mkdir(exist_ok=True)
            MEMORY.write_text(json.dumps({"state": state, "passed": passed}))
        else:
            failed.append(name)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} files passed" + "".join(f"\nfailed: {f}" for f in failed))
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
