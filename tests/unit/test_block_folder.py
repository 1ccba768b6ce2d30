"""Files of KV blocks: what was written is read, everything else is a miss and harmless."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from octavo.engine import block_folder
from octavo.engine.block_folder import FOLDER, BlockFolder
from octavo.engine.disk_tier import DiskTier, Transfer
from octavo.errors import UsageError

SEED = random.randrange(1 << 30)
SAY_SEED = f"seed {SEED}"
ROOT = Path(__file__).parents[2]
SIZE = 5000


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def content(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def write(folder: BlockFolder, number: int, group: int = 0, size: int = SIZE) -> bool:
    return folder.write(group, key(number), memoryview(content(number, size)))


def read(folder: BlockFolder, number: int, group: int = 0, size: int = SIZE) -> bytes | None:
    target = bytearray(size)
    return bytes(target) if folder.read(group, key(number), memoryview(target)) else None


@pytest.fixture
def open_folder(tmp_path):
    opened = []

    def open_one(fingerprint="f", max_bytes=1 << 20) -> BlockFolder:
        opened.append(BlockFolder(str(tmp_path / "kv"), max_bytes, fingerprint))
        return opened[-1]

    yield open_one
    for folder in opened:
        folder.close()


def files(tmp_path) -> list[Path]:
    return sorted((tmp_path / "kv" / FOLDER).iterdir())


def test_what_was_written_is_read_also_after_a_restart(open_folder):
    folder = open_folder()
    assert write(folder, 1) and write(folder, 2, group=3)
    again = open_folder()
    for one in (folder, again):
        assert read(one, 1) == content(1)
        assert read(one, 2, group=3) == content(2)
        assert read(one, 2) is None and read(one, 3) is None
    assert again.has(0, key(1), SIZE) and not again.has(1, key(1), SIZE)
    assert again.num_bytes == folder.num_bytes > 2 * SIZE


def test_other_numerics_and_other_sizes_are_other_blocks(open_folder, tmp_path):
    assert write(open_folder("one"), 1)
    other = open_folder("two")
    assert not other.has(0, key(1), SIZE)
    assert read(other, 1) is None and read(open_folder("one"), 1, size=SIZE + 16) is None
    assert len(files(tmp_path)) == 1, "another's block stays"
    assert read(open_folder("one"), 1) == content(1)


def flipped(raw: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(raw))
    return raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :]


DAMAGES = {
    "a bit": flipped,
    "cut": lambda raw, rng: raw[: rng.randrange(len(raw))],
    "longer": lambda raw, rng: raw + rng.randbytes(rng.randint(1, 99)),
    "rubbish": lambda raw, rng: rng.randbytes(len(raw)),
    "zeros": lambda raw, rng: bytes(len(raw)),
    "empty": lambda raw, rng: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_a_miss_and_goes(damage, open_folder, tmp_path):
    rng = random.Random(SEED)
    for _ in range(30):
        folder = open_folder()
        assert write(folder, 1)
        (file,) = files(tmp_path)
        file.write_bytes(DAMAGES[damage](file.read_bytes(), rng))
        if rng.random() < 0.5:
            folder = open_folder()
        assert read(folder, 1) is None, SAY_SEED
        assert not files(tmp_path) and not folder.has(0, key(1), SIZE) and folder.num_bytes == 0, SAY_SEED


def test_a_whole_block_under_another_name_is_a_miss(open_folder, tmp_path):
    folder = open_folder()
    assert write(folder, 1)
    (first,) = files(tmp_path)
    assert write(folder, 2)
    second = next(f for f in files(tmp_path) if f != first)
    second.replace(first)
    assert read(folder, 1) is None
    foreign = open_folder("other")
    assert write(foreign, 1)
    files(tmp_path)[0].replace(first)
    assert read(folder, 1) is None and not files(tmp_path)


def put_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def put_socket(path: Path, elsewhere: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(elsewhere.with_suffix(".sock")))
    elsewhere.with_suffix(".sock").replace(path)


@pytest.mark.parametrize("put", [put_link, lambda p, _: os.mkfifo(p), put_socket], ids=["link", "fifo", "socket"])
@pytest.mark.parametrize("known", [True, False])
def test_what_is_no_plain_file_is_removed_and_never_followed(put, known, open_folder, tmp_path):
    folder = open_folder()
    assert write(folder, 1)
    (file,) = files(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    file.replace(elsewhere)
    put(file, elsewhere)
    if not known:
        folder = open_folder()
        assert not files(tmp_path)
    assert read(folder, 1) is None
    assert not files(tmp_path) and elsewhere.read_bytes()
    folder = open_folder()
    assert write(folder, 1) and read(folder, 1) == content(1)


def test_a_directory_in_the_way_breaks_nothing(open_folder, tmp_path):
    folder = open_folder()
    assert write(folder, 1)
    (file,) = files(tmp_path)
    file.unlink()
    file.mkdir()
    assert read(folder, 1) is None
    assert not write(folder, 1)
    assert files(tmp_path) == [file] and write(folder, 2)


def test_only_files_of_ours_are_touched(open_folder, tmp_path):
    open_folder()
    mine = tmp_path / "kv" / FOLDER
    names = ["notes.txt", "0" * 40, "0" * 39 + ".kv", "A" * 40 + ".kv", "0" * 40 + ".kv.tmp"]
    for name in names:
        (mine / name).write_bytes(b"x" * 3000)
        os.utime(mine / name, (0, 0))
    folder = open_folder(max_bytes=2 * SIZE)
    assert folder.num_bytes == 0
    for number in range(5):
        assert write(folder, number)
    assert set(names) <= {f.name for f in files(tmp_path)}


def test_unfinished_files_go_once_nobody_can_be_writing_them(open_folder, tmp_path):
    open_folder()
    fresh, old = (tmp_path / "kv" / FOLDER / f"{'0' * 40}.kv.{n * 16}" for n in "12")
    fresh.write_bytes(b"half")
    old.write_bytes(b"half")
    os.utime(old, (0, time.time() - 2 * block_folder.TORN_AFTER_S))
    folder = open_folder()
    assert files(tmp_path) == [fresh] and folder.num_bytes == 0


def test_the_limit_holds_and_the_longest_unused_goes_first(open_folder, tmp_path):
    rng = random.Random(SEED)
    limit = 10 * (SIZE + 200)
    folder, order = open_folder(max_bytes=limit), []
    for step in range(60):
        number = rng.randrange(40)
        if number in order:
            assert read(folder, number) == content(number), SAY_SEED
            order.remove(number)
        else:
            assert write(folder, number)
        order = [*order, number][-10:]
        assert sum(f.stat().st_size for f in files(tmp_path)) == folder.num_bytes <= limit
        assert [n for n in range(40) if folder.has(0, key(n), SIZE)] == sorted(order), f"{SAY_SEED}, step {step}"
    assert not write(folder, 99, size=limit), "what can never fit is not written"


def test_the_order_of_use_survives_a_restart(open_folder, tmp_path):
    folder = open_folder()
    for number in range(4):
        assert write(folder, number)
    for age, number in enumerate((2, 0, 3, 1)):  # files know their last use to the clock's grain only
        name = folder._name(folder._header(0, key(number), SIZE))
        os.utime(tmp_path / "kv" / FOLDER / name, (0, 1000 + age))
    again = open_folder(max_bytes=2 * (SIZE + 200))
    assert write(again, 4)
    assert [n for n in range(5) if again.has(0, key(n), SIZE)] == [1, 4]


def test_too_many_files_are_not_kept(open_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(block_folder, "MAX_FILES", 5)
    folder = open_folder()
    for number in range(9):
        assert write(folder, number)
    assert len(files(tmp_path)) == 5
    monkeypatch.setattr(block_folder, "MAX_FILES", 3)
    open_folder()
    assert len(files(tmp_path)) == 3


def test_the_folder_is_the_users_alone(open_folder, tmp_path):
    before = os.umask(0)
    try:
        folder = open_folder()
        assert write(folder, 1)
    finally:
        os.umask(before)
    assert (tmp_path / "kv" / FOLDER).stat().st_mode & 0o777 == 0o700
    assert files(tmp_path)[0].stat().st_mode & 0o777 == 0o600
    (tmp_path / "kv" / FOLDER).chmod(0o750)
    with pytest.raises(UsageError, match="its mode is 750"):
        open_folder()


def test_folders_that_cannot_be_used_are_refused_with_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / FOLDER).symlink_to(tmp_path)
    for path in (tmp_path / "file", tmp_path / "linked", Path("/proc/nothing"), Path("\0")):
        with pytest.raises(UsageError, match="kv-offloading-dir") as caught:
            BlockFolder(str(path), 1 << 20, "f")
        assert "\n" not in str(caught.value)


WRITER = """
import random, sys
from octavo.engine.block_folder import BlockFolder
folder = BlockFolder(sys.argv[1], int(sys.argv[2]), "f")
rng = random.Random(int(sys.argv[3]))
target = bytearray(5000)
print("started", flush=True)
while True:
    number = rng.randrange(60)
    content = random.Random(number).randbytes(5000)
    assert folder.write(0, number.to_bytes(32, "little"), memoryview(content))
    number = rng.randrange(60)
    if folder.read(0, number.to_bytes(32, "little"), memoryview(target)):
        assert bytes(target) == random.Random(number).randbytes(5000)
"""


def start_writer(tmp_path, limit: int, seed: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(tmp_path / "kv"), str(limit), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    return process


def test_two_engines_share_a_folder_and_kill_leaves_only_whole_blocks(tmp_path):
    limit = 30 * (SIZE + 200)
    processes = [start_writer(tmp_path, limit, SEED + i) for i in range(2)]
    try:
        mine = BlockFolder(str(tmp_path / "kv"), limit, "f")
        give_up = time.monotonic() + 1.0
        hits = 0
        while time.monotonic() < give_up:
            number = random.randrange(60)
            write(mine, number)
            found = read(mine, number)
            assert found in (None, content(number)), SAY_SEED
            hits += found is not None
        assert all(p.poll() is None for p in processes), "a writer failed"
        assert hits > 10
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    mine.scan()
    whole = [n for n in range(60) if mine.has(0, key(n), SIZE)]
    assert whole and all(read(mine, n) == content(n) for n in whole), SAY_SEED
    assert mine.num_bytes <= limit + 3 * (limit // block_folder.RESCAN_SHARE + SIZE + 200)
    mine.close()


# -- the thread --------------------------------------------------------------------------------------------------------


def transfer(write: bool, number: int) -> Transfer:
    return Transfer(write, 0, key(number), number, memoryview(bytearray(content(number) if write else bytes(SIZE))))


def wait_for(tier: DiskTier, count: int) -> list[Transfer]:
    finished: list[Transfer] = []
    give_up = time.monotonic() + 10
    while len(finished) < count and time.monotonic() < give_up:
        finished += tier.finished()
        time.sleep(0.001)
    assert len(finished) == count
    return finished


def test_the_thread_writes_and_reads(tmp_path):
    woken = threading.Event()
    tier = DiskTier(BlockFolder(str(tmp_path / "kv"), 1 << 20, "f"), woken.set)
    assert tier.wants(0, key(1), SIZE)
    assert tier.write(transfer(True, 1))
    (written,) = wait_for(tier, 1)
    assert written.ok and written.done and written.seconds > 0
    assert not tier.wants(0, key(1), SIZE) and tier.has(0, key(1), SIZE)
    for number in (1, 2):
        tier.read(transfer(False, number))
    there, missing = wait_for(tier, 2)
    assert (there.ok, missing.ok) == (True, False) and there.content == content(1)
    assert woken.is_set()
    tier.close()


class SlowFolder:
    """A disk that moves when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.order: list[tuple[str, bytes]] = []
        self.num_bytes = 0
        self.error: Exception | None = None

    def has(self, group, key, size):
        return False

    def write(self, group, key, content):
        return self._act("write", key)

    def read(self, group, key, target):
        return self._act("read", key)

    def _act(self, verb, key):
        self.go.acquire()
        self.order.append((verb, key))
        if self.error:
            raise self.error
        return True

    def close(self):
        pass


def test_writes_beyond_the_queue_are_dropped_and_reads_go_first():
    folder = SlowFolder()
    tier = DiskTier(folder, lambda: None, max_queued_writes=2)
    assert tier.write(transfer(True, 0))
    while tier._writes:  # until the thread has taken it
        time.sleep(0.001)
    assert tier.write(transfer(True, 1)) and tier.write(transfer(True, 2))
    assert not tier.write(transfer(True, 3))
    assert not tier.wants(0, key(2), SIZE) and tier.wants(0, key(3), SIZE)
    tier.read(transfer(False, 4))
    folder.go.release(9)
    assert all(t.ok for t in wait_for(tier, 4))
    assert folder.order == [("write", key(0)), ("read", key(4)), ("write", key(1)), ("write", key(2))]
    tier.close()


def test_a_full_disk_ends_writing_with_one_line_and_nothing_else(caplog):
    folder = SlowFolder()
    folder.error = OSError(28, "No space left on device")
    folder.go.release(99)
    tier = DiskTier(folder, lambda: None)
    for number in range(4):
        assert tier.write(transfer(True, number))
    assert not any(t.ok for t in wait_for(tier, 4))
    assert len(folder.order) == 1 and not tier.wants(0, key(9), SIZE)
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text
    folder.error = None
    tier.read(transfer(False, 1))
    assert wait_for(tier, 1)[0].ok, "what is there can be read"
    tier.close()


def test_closing_waits_for_what_is_to_be_written(tmp_path):
    tier = DiskTier(BlockFolder(str(tmp_path / "kv"), 1 << 20, "f"), lambda: None)
    assert all(tier.write(transfer(True, number)) for number in range(20))
    tier.close(drain_s=10)
    folder = BlockFolder(str(tmp_path / "kv"), 1 << 20, "f")
    assert all(folder.has(0, key(number), SIZE) for number in range(20))
    folder.close()
