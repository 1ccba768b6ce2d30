"""Processes that die, signals, departures, slow clients: over real HTTP, with the null engine, which we steer."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.e2e.server_process import NULL_SERVE, ROOT, RawStream, ServerProcess, events, wait_until
from tests.engine.null_engine import SLOW

STEP_S = 0.2
"""of a step with a prompt that begins with SLOW"""
COMPLETIONS = "/v1/completions"


def slow(max_tokens: int, **more: object) -> dict:
    return {"prompt": [SLOW, 5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, **more}


def quick(max_tokens: int, **more: object) -> dict:
    return slow(max_tokens, **more) | {"prompt": [9, 5, 6, 7]}


@pytest.fixture
def start(tmp_path, smollm2_path):
    """Starts a null server with further flags; all are ended after the test."""
    started: list[ServerProcess] = []

    def begin(*args: str) -> ServerProcess:
        log = tmp_path / f"server-{len(started)}.log"
        server = ServerProcess(log, str(smollm2_path), "--num-gpu-blocks-override", "4096", *args, program=NULL_SERVE)
        started.append(server)
        return server.ready()

    yield begin
    for server in started:
        server.__exit__()


def begun(server: ServerProcess, body: dict) -> RawStream:
    """A stream that has shown its first token."""
    stream = server.open_stream(COMPLETIONS, body)
    stream.wait_for(b"data: ")
    return stream


def test_death_of_the_engine_ends_streams_and_server(start):
    server = start()
    streams = [begun(server, slow(1000)) for _ in range(3)]
    server.engine.kill()
    died = time.monotonic()
    wait_until(lambda: server.health() == 503, 1, "/health says 503")
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(lambda s: list(events(s.rest())), streams))
    assert time.monotonic() - died < 3
    for end in ends:
        assert end[-1] == "[DONE]"
        assert end[-2]["error"]["code"] == 503
        assert "engine is not running" in end[-2]["error"]["message"]
    assert server.process.wait(10) == 1
    assert "killed by SIGKILL" in server.log.read_text()


def test_a_dead_engine_is_started_again_as_often_as_allowed(start):
    server = start("--engine-restarts", "1")
    stream = begun(server, slow(1000))
    directory = Path(server.engine.cwd())
    server.engine.kill()
    assert list(events(stream.rest()))[-1] == "[DONE]"
    wait_until(lambda: server.health() == 200, 20, "/health says 200 again")
    assert not directory.exists()
    status, answer = server.post(COMPLETIONS, quick(7))
    assert (status, answer["usage"]["completion_tokens"]) == (200, 7)
    server.ready_engine().kill()
    assert server.process.wait(15) == 1


def test_death_of_the_server_ends_the_engine(start):
    server = start()
    stream = begun(server, slow(1000))
    engine, directory = server.engine, Path(server.engine.cwd())
    assert directory.stat().st_mode & 0o777 == 0o700
    server.process.kill()
    server.process.wait(10)
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 5, "the engine ends")
    wait_until(lambda: not directory.exists(), 5, f"{directory} is gone")
    stream.cut()


def test_sigterm_lets_running_requests_finish(start):
    server = start()
    stream = begun(server, slow(12))
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.health() == 503, 1, "/health says 503")
    status, headers, body = server.call("POST", COMPLETIONS, quick(1))
    assert status == 503
    assert b"shutting down" in body
    assert "retry-after" in headers
    rest = list(events(stream.rest()))
    assert rest[-1] == "[DONE]"
    assert rest[-2]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(5) == 0


@pytest.mark.parametrize("how", ["second signal", "timeout"])
def test_requests_that_take_too_long_are_ended(start, how):
    server = start("--shutdown-timeout", "0.5" if how == "timeout" else "60")
    stream = begun(server, slow(1000))
    server.process.send_signal(signal.SIGINT)
    if how == "second signal":
        wait_until(lambda: server.health() == 503, 1, "/health says 503")
        server.process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    rest = list(events(stream.rest()))
    assert rest[-1] == "[DONE]"
    assert "error" in rest[-2] or rest[-2]["choices"][0]["finish_reason"] == "abort"
    assert server.process.wait(10) == 0
    assert time.monotonic() - asked < 8


def blocks_of_a_sequence(shown: dict[str, float]) -> int:
    """The most that the oldest one can hold: one token a step since it began, four a block."""
    return int(4 + shown["octavo:engine_steps_total"]) // 4 + 1


def test_clients_that_leave_free_their_blocks_within_two_steps(start):
    server = start()
    stays = begun(server, slow(1000))
    streams = [begun(server, quick(1000)) for _ in range(16)]
    before = server.metrics()
    assert before["octavo:kv_blocks_used"] >= 17
    assert before["vllm:num_requests_running"] == 17
    for stream in streams:
        stream.cut()

    def only_one_left() -> bool:
        server.health()  # brings fresh stats
        return server.metrics()["vllm:num_requests_running"] == 1

    wait_until(only_one_left, 5, "16 requests are gone")
    after = server.metrics()
    assert after["octavo:engine_steps_total"] - before["octavo:engine_steps_total"] <= 2
    assert after["octavo:kv_blocks_used"] <= blocks_of_a_sequence(after)
    assert after["vllm:request_success_total"] == 16
    stays.cut()
    wait_until(lambda: server.health() == 200 and server.metrics()["octavo:kv_blocks_used"] == 0, 5, "all is free")


def test_a_client_that_leaves_before_its_whole_answer_frees_its_blocks(start):
    server = start()
    client = RawStream(server.host, server.port, COMPLETIONS, slow(1000), None)
    wait_until(lambda: server.health() == 200 and server.metrics()["octavo:kv_blocks_used"] > 0, 5, "it runs")
    client.cut()
    wait_until(lambda: server.health() == 200 and server.metrics()["octavo:kv_blocks_used"] == 0, 5, "all is free")


def test_what_is_held_for_a_slow_client_is_bounded(start):
    server = start("--max-buffered-events", "1024")
    body = quick(8000, return_token_ids=True)
    stream = server.open_stream(COMPLETIONS, body, receive_buffer=4096)
    wait_until(lambda: server.health() == 200 and server.metrics()["octavo:kv_blocks_used"] > 0, 5, "it runs")
    wait_until(lambda: server.health() == 200 and server.metrics()["octavo:kv_blocks_used"] == 0, 30, "it is ended")
    assert server.metrics()["vllm:generation_tokens_total"] < 8000
    rest = list(events(stream.rest()))
    assert rest[-1] == "[DONE]"
    assert "too slowly" in rest[-2]["error"]["message"]


def test_a_failed_sequence_is_a_500_and_the_others_go_on(start):
    server = start()
    stays = begun(server, slow(5))
    status, answer = server.post(COMPLETIONS, quick(5) | {"prompt": [2, 5]})
    assert status == 500
    assert answer["error"]["type"] == "InternalServerError"
    assert "broken" not in answer["error"]["message"]
    assert "this sequence is broken" in server.log.read_text()
    assert list(events(stays.rest()))[-1] == "[DONE]"
    assert server.health() == 200


def serve_and_end(*args: str) -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", *args], capture_output=True, text=True, timeout=60, cwd=ROOT,
        check=False,
    )  # fmt: skip
    return run.returncode, run.stderr


def test_a_taken_port_is_one_line_and_exit_code_2(smollm2_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, text = serve_and_end(str(smollm2_path), "--port", str(other.getsockname()[1]))
    assert code == 2
    assert text.startswith("octavo: error: cannot listen on 127.0.0.1:")
    assert "taken" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("model", ["no-such-model", "/nowhere/model.gguf", "{folder}", "{lfs}", "{magic}"])
def test_a_bad_model_is_one_line_and_exit_code_2(tmp_path, model):
    (tmp_path / "lfs.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (tmp_path / "magic.gguf").write_bytes(b"GGML" + bytes(64))
    (tmp_path / "folder").mkdir()
    name = model.format(folder=tmp_path / "folder", lfs=tmp_path / "lfs.gguf", magic=tmp_path / "magic.gguf")
    code, text = serve_and_end(name, "--port", "0")
    assert code == 2, text
    assert text.startswith("octavo: error: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text


@pytest.mark.parametrize("redirections", [">/dev/full 2>&1", ">&- 2>&- <&-", "2>&1 | true"])
def test_a_server_lives_on_without_its_log(redirections, smollm2_path):
    """Whatever it wants to say meanwhile: there is a line for each call."""
    port = free_port()
    program = f'echo $BASHPID >&3; exec "$0" {" ".join(NULL_SERVE)} "$@"'
    words = [sys.executable, str(smollm2_path), "--port", str(port), "--enable-access-log", "--enable-log-requests"]
    read, write = os.pipe()
    shell = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", f"({program}) 3>&{write} {redirections}", *words], stdin=subprocess.DEVNULL,
        pass_fds=[write], env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    os.close(write)
    with open(read) as pids, shell:
        server = psutil.Process(int(pids.readline()))
        try:
            wait_until(lambda: ask(port, "GET", "/health") == 200, 60, "healthy")
            for _ in range(3):
                assert ask(port, "POST", COMPLETIONS, {"prompt": [9, 5, 6], "max_tokens": 3}) == 200
            server.terminate()
            assert shell.wait(30) == 0
        finally:
            if server.is_running():
                server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, method: str, path: str, body: object = None) -> int:
    """The status; 0 when nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_answers_503_and_when_to_come_back(start, stream):
    server = start("--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    running = begun(server, slow(1000))
    waiting = server.open_stream(COMPLETIONS, slow(3))
    wait_until(lambda: server.metrics()["vllm:num_requests_waiting"] == 1, 5, "one waits")
    status, headers, body = server.call("POST", COMPLETIONS, quick(3, stream=stream))
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    error = json.loads(body)["error"]
    assert "1 requests are waiting; limit: 1 (--max-num-queued-reqs)" in error["message"]
    wait_until(lambda: server.metrics()["vllm:admission_rejections_total"] == 1, 5, "it is counted")
    running.cut()
    assert list(events(waiting.rest()))[-1] == "[DONE]"
    assert server.post(COMPLETIONS, quick(3))[0] == 200
