"""What was typed before, and what of it the next run finds."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.tools.history import LIMIT, decoded, encoded

ROOT = Path(__file__).parents[2]
ALPHABET = 'ab\\n\n "é'


@pytest.mark.parametrize("seed", [random.randrange(1 << 30) for _ in range(5)])
def test_messages_survive_their_line(seed):
    rng = random.Random(seed)
    for _ in range(200):
        message = "".join(rng.choices(ALPHABET, k=rng.randrange(12)))
        assert "\n" not in encoded(message)
        assert decoded(encoded(message)) == message


def in_another_process(state: Path, code: str) -> str:
    """readline is one for the whole process, and not ours to change here."""
    program = f"import readline; from octavo.tools.history import History; h = History(); {code}"
    environment = {"XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True, timeout=60
    ).stdout


def test_a_message_of_several_lines_is_one_entry_in_the_next_run(tmp_path):
    in_another_process(tmp_path, r"h.add('first\nlast'); h.add('  '); h.add('C:\\new')")
    shown = in_another_process(tmp_path, "print([readline.get_history_item(i + 1) for i in range(3)])")
    assert shown == f"{['first' + chr(10) + 'last', 'C:' + chr(92) + 'new', None]}\n"


def test_the_file_is_private_and_does_not_grow_for_ever(tmp_path):
    in_another_process(tmp_path, f"[h.add(str(i)) for i in range({2 * LIMIT + 1})]")
    path = tmp_path / "octavo" / "history"
    assert path.stat().st_mode & 0o077 == 0
    in_another_process(tmp_path, "")
    assert path.read_text().split() == [str(i) for i in range(LIMIT + 1, 2 * LIMIT + 1)]


def test_a_home_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "octavo").write_text("a file")
    in_another_process(tmp_path, "h.add('hello')")
