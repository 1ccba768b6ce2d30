"""The engine process and its clients, over the null engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import zmq

from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
from octavo.engine.messages import Ack, AddRequest, Hello, Outputs, Ping, decode_from_engine, encode
from octavo.engine.types import Request, SamplingParams
from octavo.errors import EngineDead, InvalidRequest, NotEnoughMemory, UsageError
from tests.engine.null_engine import BROKEN, FAULT, HANG, SLOW
from tests.null.memory import continuation

VOCAB = 1000
PROGRAM = (sys.executable, "-m", "tests.engine.null_engine")


def config(**fields):
    base = {
        "model": "null", "path": "null", "device": "null", "dtype": "none", "max_model_len": 200, "vocab_size": VOCAB,
        "eos_token_ids": (), "block_size": 4, "gpu_memory_utilization": None, "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "tensor_parallel_size": 1,
        "threads": None, "seed": 0,
    }  # fmt: skip
    return EngineConfig(**{**base, **fields})


exists = os.path.exists
LOOPS = pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])


@asynccontextmanager
async def engine(max_buffered_events=4096, **fields):
    client = await EngineClient.start(config(**fields), program=PROGRAM, max_buffered_events=max_buffered_events)
    try:
        yield client
    finally:
        pid, directory = client.facts.pid, client.directory
        await client.shutdown(timeout_s=5)
        assert not exists(directory)
        assert not psutil.pid_exists(pid)


def request(name, *prompt, count=5, **fields):
    sampling = SamplingParams(max_tokens=count, ignore_eos=True, **fields)
    return Request(request_id=name, prompt_token_ids=list(prompt), sampling=sampling)


async def collect(client, wanted):
    events = [e async for batch in client.generate(wanted) for e in batch]
    for choice in range(wanted.sampling.n):
        ends = [e.finish_reason for e in events if e.choice == choice]
        assert ends[-1] is not None
        assert not any(ends[:-1])
    return events


async def until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


async def test_answers_progress_facts_and_health():
    seen = []
    client = await EngineClient.start(config(), seen.append, program=PROGRAM)
    try:
        assert client.facts.num_blocks == 64
        assert [(p.done, p.total) for p in seen][-1] == (2, 2)
        answers = await asyncio.gather(*(collect(client, request(str(i), i + 10, 5, count=7)) for i in range(20)))
        for i, events in enumerate(answers):
            assert [t for e in events for t in e.token_ids] == continuation([i + 10, 5], 7, VOCAB)
        await client.check_health(2)
        assert client.stats.blocks_used == 0
        assert client.stats.generation_tokens == 140
        assert client._streams == {}
        assert client.timings == {}
    finally:
        await client.shutdown()


async def test_an_idle_engine_uses_no_cpu():
    async with engine() as client:
        await collect(client, request("a", 10))
        process = psutil.Process(client.facts.pid)
        before = process.cpu_times()
        await asyncio.sleep(1.0)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.03


async def test_bad_requests_end_alone():
    async with engine() as client:
        bad = await collect(client, request("bad", VOCAB + 7))
        assert bad[-1].error["class"] == "InvalidRequest"
        assert "vocabulary" in bad[-1].error["cause"]
        assert len(await collect(client, request("long", *[5] * 300))) == 1
        good = asyncio.create_task(collect(client, request("good", SLOW, count=4)))
        fault = await collect(client, request("fault", FAULT, n=2))
        assert [e.finish_reason for e in fault] == ["error", "error"]
        assert (await good)[-1].finish_reason == "length"
        with pytest.raises(InvalidRequest):
            await collect(client, request("n", 5, n=0))


@LOOPS
async def test_a_broken_step_ends_its_requests_and_three_in_a_row_the_engine(overlapped):
    async with engine(async_scheduling=overlapped) as client:
        for _ in range(2):
            events = await collect(client, request("broken", BROKEN))
            assert "this step is broken" in events[-1].error["cause"]
        assert (await collect(client, request("good", 9)))[-1].finish_reason == "length"
        for _ in range(3):
            await collect(client, request("broken", BROKEN))
        assert "3 steps in a row" in str(await asyncio.wait_for(client.died(), 5))
        with pytest.raises(EngineDead):
            await collect(client, request("late", 9))
        with pytest.raises(EngineDead):
            await client.check_health()


@LOOPS
async def test_a_step_broken_by_the_newest_request_goes_on_without_it(overlapped):
    async with engine(async_scheduling=overlapped) as client:
        old = asyncio.create_task(collect(client, request("old", SLOW, count=9)))
        await until(lambda: client.stats.running == 1)
        events = await collect(client, request("broken", BROKEN))
        assert "this step is broken" in events[-1].error["cause"]
        answer = [t for e in await old for t in e.token_ids]
        assert answer == continuation([SLOW], 9, VOCAB)


@LOOPS
async def test_both_loops_give_the_same_tokens(overlapped):
    rng = random.Random(5)
    async with engine(async_scheduling=overlapped, num_gpu_blocks_override=40) as client:
        prompts = [[rng.randrange(9, VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(24)]
        wanted = [request(str(i), *p, count=rng.randint(1, 60)) for i, p in enumerate(prompts)]
        for asked, events in zip(wanted, await asyncio.gather(*(collect(client, r) for r in wanted)), strict=True):
            expected = continuation(asked.prompt_token_ids, asked.sampling.max_tokens, VOCAB)
            assert [t for e in events for t in e.token_ids] == expected
        assert client.stats.preemptions > 0


@LOOPS
async def test_abort_frees_blocks_within_two_steps(overlapped):
    async with engine(async_scheduling=overlapped) as client:
        keep = asyncio.create_task(collect(client, request("keep", SLOW, count=12)))
        await until(lambda: client.stats.running == 1)
        stream = client.generate(request("go", *[9] * 40, count=100))
        await anext(stream)
        used, steps = client.stats.blocks_used, client.stats.steps
        assert used >= 11
        await stream.aclose()
        await until(lambda: client.stats.blocks_used < 10)
        late = 3 + overlapped
        assert client.stats.steps <= steps + late, "the abort arrives within one step, and two or three more may pass"
        client.abort("keep")
        assert (await keep)[-1].finish_reason == "abort"


async def test_a_slow_consumer_is_aborted():
    async with engine(max_buffered_events=10) as client:
        stream = client.generate(request("slow", 9, count=150))
        events = list(await anext(stream))
        await until(lambda: client.stats.running == 0 and client.stats.steps > 5)
        events += [e async for batch in stream for e in batch]
        assert len(events) <= 22
        assert events[-1].finish_reason == "error"
        assert "too slowly" in events[-1].error["cause"]


async def test_killing_the_engine_ends_every_stream_at_once():
    async with engine() as client:
        tasks = [asyncio.create_task(collect(client, request(f"{i}", SLOW, n=2, count=50))) for i in range(3)]
        await until(lambda: client.stats.steps > 1)
        os.kill(client.facts.pid, signal.SIGKILL)
        start = time.monotonic()
        for events in await asyncio.gather(*tasks):
            assert events[-1].error["class"] == "EngineDead"
        assert time.monotonic() - start < 2.0
        assert client.is_dead
        assert "SIGKILL" in str(await client.died())


async def test_failures_while_starting_are_typed(capfd):
    with pytest.raises(NotEnoughMemory, match="does not fit"):
        await EngineClient.start(config(model="too-big"), program=PROGRAM)
    with pytest.raises(EngineDead, match=r"exit status 7.*about to die"):
        await EngineClient.start(config(model="dies"), program=PROGRAM)


async def test_sigterm_drains_and_sigint_is_ignored():
    async with engine() as client:
        task = asyncio.create_task(collect(client, request("a", SLOW, count=4)))
        await until(lambda: client.stats.steps > 0)
        os.kill(client.facts.pid, signal.SIGINT)
        os.kill(client.facts.pid, signal.SIGTERM)
        late = await collect(client, request("late", 9))
        assert late[-1].error["class"] == "Overloaded"
        assert (await task)[-1].finish_reason == "length"
        assert "exit status 0" in str(await asyncio.wait_for(client.died(), 5))


async def test_shutdown_at_once_tells_the_open_streams():
    async with engine() as client:
        task = asyncio.create_task(collect(client, request("a", SLOW, count=100)))
        await until(lambda: client.stats.steps > 0)
        await client.shutdown(drain=False)
        assert (await task)[-1].finish_reason == "abort"


async def test_a_hung_engine_is_noticed_and_shut_down():
    async with engine() as client:
        task = asyncio.create_task(collect(client, request("a", HANG)))
        await asyncio.sleep(0.2)
        with pytest.raises(EngineDead, match=r"has not stepped for 1 s; limit: 0.3 s"):
            await client.check_health(0.3)
        await client.shutdown(timeout_s=0.3)
        assert (await task)[-1].finish_reason == "error"


PARENT = """
import asyncio, sys
from octavo.engine.client import EngineClient
from tests.engine.test_client_lifecycle import PROGRAM, collect, config, request
async def main():
    if len(sys.argv) > 1:
        client = await EngineClient.attach(sys.argv[1])
    else:
        client = await EngineClient.start(config(), program=PROGRAM)
    prompt = [int(t) for t in sys.stdin.readline().split()]
    task = asyncio.create_task(collect(client, request("r", *prompt, count=100)))
    await asyncio.sleep(0.5)
    print(client.facts.pid, client.directory, flush=True)
    await task
asyncio.run(main())
"""


@asynccontextmanager
async def other_process(prompt, *arguments):
    """A program of its own that starts (or attaches to) an engine and streams; yields (it, engine pid, directory)."""
    process = subprocess.Popen(  # noqa: ASYNC220 - takes milliseconds, and nothing else runs here
        [sys.executable, "-c", textwrap.dedent(PARENT), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        process.stdin.write(" ".join(map(str, prompt)) + "\n")
        process.stdin.flush()
        pid, directory = (await asyncio.to_thread(process.stdout.readline)).split()
        yield process, int(pid), directory
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize("prompt", [(SLOW,), (HANG,)], ids=["stepping", "hung in a step"])
async def test_the_engine_ends_with_its_parent(prompt):
    async with other_process(prompt) as (parent, pid, directory):
        assert psutil.pid_exists(pid)
        parent.kill()
        await until(lambda: not _alive(pid), 2.0)
        await until(lambda: not exists(directory), 2.0)


def _alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_second_client_killed_frees_its_blocks():
    async with engine() as client:
        mine = asyncio.create_task(collect(client, request("r", SLOW, count=20)))
        async with other_process([SLOW] * 40, client.directory) as (other, pid, _):
            assert pid == client.facts.pid
            await until(lambda: client.stats.blocks_used > 10)
            other.kill()
            other.wait()
            await until(lambda: client.stats.blocks_used < 10, 3.0)
        assert (await mine)[-1].finish_reason == "length"
        assert client.stats.blocks_used == 0


async def test_an_attached_client_notices_death_and_leaves_the_engine_alone():
    async with engine() as client:
        guest = await EngineClient.attach(client.directory)
        assert guest.facts == client.facts
        assert (await collect(guest, request("r", 9)))[-1].finish_reason == "length"
        await guest.close()
        await client.check_health()
        guest = await EngineClient.attach(client.directory)
        task = asyncio.create_task(collect(guest, request("r", SLOW, count=50)))
        await until(lambda: guest.stats.steps > 2)
        os.kill(client.facts.pid, signal.SIGKILL)
        assert (await asyncio.wait_for(task, 3))[-1].finish_reason == "error"
        await guest.close()
        leftover = client.directory
        with pytest.raises(EngineDead, match="nobody answers"):
            await EngineClient.attach(leftover)
    with pytest.raises(EngineDead, match="no engine"):
        await EngineClient.attach(leftover)


async def test_a_client_that_acknowledges_nothing_is_paused():
    async with engine(max_unacked_messages=5) as client:
        from octavo.engine.client import _hold_lock

        lock = _hold_lock(client.directory, "mute")
        context = zmq.Context()
        mute = context.socket(zmq.DEALER)
        mute.setsockopt(zmq.IDENTITY, b"mute")
        mute.connect(f"ipc://{client.directory}/engine.sock")
        for message in (Hello(), AddRequest(request("r", 9, 9, count=60))):
            mute.send(encode(message))
        got = []

        async def read(seconds):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                while mute.poll(0):
                    got.append(decode_from_engine(mute.recv()))
                await asyncio.sleep(0.01)

        await read(0.5)
        outputs = [m for m in got if isinstance(m, Outputs)]
        assert 6 <= len(outputs) <= 7, "a step may be under way when the client is paused"
        others = await collect(client, request("other", 9, count=30))
        assert others[-1].finish_reason == "length"
        mute.send(encode(Ping()))
        mute.send(encode(Ack(len(outputs))))
        await read(0.5)
        before, outputs = len(outputs), [m for m in got if isinstance(m, Outputs)]
        assert before < len(outputs) <= before + 7
        assert [m.sequence for m in outputs] == list(range(1, len(outputs) + 1))
        mute.close(linger=0)
        context.term()
        os.close(lock)
        await until(lambda: not exists(f"{client.directory}/mute.lock"), 2.0)


async def test_lost_messages_fail_the_open_requests():
    async with engine() as client:
        task = asyncio.create_task(collect(client, request("a", SLOW, count=50)))
        await until(lambda: client.stats.steps > 0)
        client._sequence -= 1
        assert "lost" in (await task)[-1].error["cause"]
        await until(lambda: client.stats.blocks_used == 0 or (client._sequence and client._send(Ping())))
        assert (await collect(client, request("b", 9)))[-1].finish_reason == "length"


async def test_closing_the_iterator_and_cancelling_abort():
    async with engine() as client:
        task = asyncio.create_task(collect(client, request("a", SLOW, count=50)))
        await until(lambda: client.stats.running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(10):
            await client.check_health()
            if client.stats.running == 0:
                break
        assert client.stats.running == client.stats.blocks_used == 0


def test_under_uvloop_and_twice_in_one_process():
    import uvloop

    async def both():
        async with engine() as one, engine() as two:
            answers = await asyncio.gather(*(collect(c, request("r", 8, count=30)) for c in (one, two)))
            assert len({tuple(t for e in a for t in e.token_ids) for a in answers}) == 1

    uvloop.run(both())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_a_fork_of_the_process_cannot_use_it_and_does_not_end_it():
    async with engine() as client:
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                asyncio.events._set_running_loop(None)
                asyncio.run(_in_a_fork(client))
                failed = 0
            finally:
                os._exit(failed)
        status = await asyncio.wait_for(asyncio.to_thread(os.waitpid, child, 0), 10)
        assert status == (child, 0)
        await client.check_health()
        assert (await collect(client, request("r", 9)))[-1].finish_reason == "length"


async def _in_a_fork(client):
    for use in (collect(client, request("f", 9)), client.check_health()):
        with pytest.raises(UsageError, match="is a fork of it"):
            await use
    await client.shutdown()
    await client.close()


STARTING = """
import asyncio, resource, sys
from octavo.engine.client import EngineClient
from octavo.errors import UsageError
from tests.engine.test_client_lifecycle import PROGRAM, config
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
async def main():
    client = await EngineClient.start(config(), program=PROGRAM)
    await client.shutdown()
try:
    asyncio.run(main())
except UsageError as err:
    print(err)
"""


@pytest.mark.parametrize("files", [12, 20, 63, 64])
def test_too_few_open_files_are_one_line_and_leave_nothing(tmp_path, files):
    done = subprocess.run(
        [sys.executable, "-c", STARTING, str(files)], capture_output=True, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=60,
    )  # fmt: skip
    said = "" if files == 64 else f"this process may open {files} files; limit: at least 64; fix: raise it: ulimit"
    assert done.stdout.startswith(said), done
    assert bool(done.stdout) == bool(said), done
    assert (done.returncode, done.stderr, os.listdir(tmp_path)) == (0, "", [])


def all_stopped(pid: int) -> bool:
    """Whether every thread has taken in SIGSTOP, which takes a while where others want the CPUs."""
    states = [task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


async def test_what_a_killed_engine_and_client_left_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    lock = "0" * 32 + ".lock"
    others = {"octavo-mine": "notes.txt", "octavo-poetry": "poetry.lock", "octavo-both": lock, "octavo-new": None}
    others |= {"octavo-full": lock, "octavo-pipe": None, "octavo-folder": None, "octavo-pulse": lock}
    for name, file in others.items():
        (tmp_path / name).mkdir()
        if file:
            (tmp_path / name / file).touch()
    (tmp_path / "octavo-both" / "notes.txt").touch()
    (tmp_path / "octavo-full" / lock).write_text("somebody's")
    os.mkfifo(tmp_path / "octavo-pipe" / lock)
    (tmp_path / "octavo-folder" / lock).mkdir()
    (tmp_path / "octavo-pulse" / "pulse").mkdir()
    async with engine() as living, other_process([SLOW]) as (parent, pid, directory):
        os.kill(pid, signal.SIGSTOP)  # so that it does not see its parent's end
        await until(lambda: all_stopped(pid))
        parent.kill()
        parent.wait()
        os.kill(pid, signal.SIGKILL)
        assert exists(directory)
        async with engine() as client:
            assert not exists(directory)
            assert {*others, *map(os.path.basename, (living.directory, client.directory))} == set(os.listdir(tmp_path))
            assert (await collect(living, request("r", 9)))[-1].finish_reason == "length"
