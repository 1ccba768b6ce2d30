"""The thread pool: right under resizing, idling, concurrent callers, fork and exit; idle costs nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from octavo.backends.cpu.ops import CpuOps
from tests.backend.conftest import bf16, library

ROOT = Path(__file__).parents[2]


def work():
    """(a call that uses all threads, what it gives)."""
    ops = CpuOps(library().kernels())
    packed, x = ops.pack_linear(bf16(512, 128), None), bf16(3, 128)
    return (lambda: ops.linear(x, packed)), ops.linear(x, packed)


def run_python(code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


def test_survives_resizes_and_idle_periods():
    call, want = work()
    for i in range(1000):
        if random.random() < 0.5:
            library().set_threads(random.randint(1, 6))
        if i % 50 == 0:
            time.sleep(0.002)  # long enough for the workers to fall asleep
        assert torch.equal(call(), want)


def test_wakes_after_every_length_of_pause():
    call, want = work()
    library().set_threads(3)
    for _ in range(300):
        deadline = time.perf_counter() + random.random() * 2e-4  # around the time workers spin before they sleep
        while time.perf_counter() < deadline:
            pass
        assert torch.equal(call(), want)


def test_several_callers_at_once():
    call, want = work()
    library().set_threads(4)
    wrong = []

    def repeat():
        for _ in range(300):
            if not torch.equal(call(), want):
                wrong.append(threading.get_ident())

    callers = [threading.Thread(target=repeat) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_idle_uses_no_cpu():
    call, _ = work()
    library().set_threads(4)
    call()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.01


def test_exit_right_after_work_and_after_idling():
    code = """
import time, torch
from octavo.backends.base import open_device
ops = open_device("cpu", threads=4).ops
packed = ops.pack_linear(torch.ones(512, 128).bfloat16(), None)
assert ops.linear(torch.ones(2, 128).bfloat16(), packed).eq(128).all()
time.sleep(PAUSE)
"""
    for pause in ("0", "0.05"):
        done = run_python(code.replace("PAUSE", pause))
        assert done.returncode == 0, done.stderr


def test_a_forked_child_works_alone():
    code = """
import os, torch
from octavo.backends.base import open_device
ops = open_device("cpu", threads=4).ops
packed, x = ops.pack_linear(torch.randn(512, 128).bfloat16(), None), torch.randn(2, 128).bfloat16()
want = ops.linear(x, packed)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(ops.linear(x, packed), want) else 7)
_, status = os.waitpid(child, 0)
assert torch.equal(ops.linear(x, packed), want)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    done = run_python(code)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_pinning_binds_each_thread():
    cpus = sorted(os.sched_getaffinity(0))[:2]
    code = f"""
import os
from octavo.backends.cpu import lib
lib.load().set_threads({len(cpus)}, pin=True)
tasks = [int(t) for t in os.listdir("/proc/self/task")]
print(sorted(tuple(os.sched_getaffinity(t)) for t in tasks if len(os.sched_getaffinity(t)) == 1))
"""
    done = run_python(code)
    assert done.stdout.strip() == str([(c,) for c in cpus]), done
