"""Connections that say nothing or stop half-way: they end, and never keep others out."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.server_process import ServerProcess, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n"
HALF_SENT = (b"", b"\r\n", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n", HEAD + b"\r\n", HEAD + b"\r\n{")
ARRIVAL_S = 1.0
SHORT_OF_PATIENCE = (
    "-c",
    f"import octavo.server.connections as c, runpy; c.BoundedProtocol.arrival_s = {ARRIVAL_S};"
    "runpy.run_module('tests.e2e.null_server', run_name='__main__')",
)


def open_socket(server: ServerProcess, sent: bytes) -> socket.socket:
    made = socket.create_connection((server.host, server.port), timeout=20)
    made.sendall(sent)
    return made


@pytest.fixture(scope="module")
def impatient(tmp_path_factory, smollm2_path) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("impatient") / "log"
    with ServerProcess(log, str(smollm2_path), program=SHORT_OF_PATIENCE) as running:
        yield running


@pytest.mark.parametrize("sent", HALF_SENT)
def test_what_does_not_arrive_is_closed(impatient, sent):
    with open_socket(impatient, sent) as client:
        start = time.monotonic()
        assert client.recv(100) == b""
        assert ARRIVAL_S * 0.8 < time.monotonic() - start < ARRIVAL_S + 3
    assert impatient.health() == 200
    assert "Traceback" not in impatient.log.read_text()


def test_a_head_may_not_drip(impatient):
    with open_socket(impatient, b"GET /health HTTP/1.1\r\n") as client:
        start = time.monotonic()
        client.settimeout(0.1)
        got: bytes | None = None
        while got is None and time.monotonic() - start < 10:
            try:
                client.sendall(b"X: y\r\n")
                got = client.recv(100)
            except TimeoutError:
                pass
            except ConnectionError:
                got = b""
        assert got == b""
        assert time.monotonic() - start < ARRIVAL_S + 3


def test_a_body_may_take_its_time_and_so_may_an_answer(impatient):
    body = b'{"prompt": [9, 5], "max_tokens": 3}'.ljust(12)
    head = HEAD.replace(b"999", str(len(body)).encode()) + b"Connection: close\r\n\r\n"
    with open_socket(impatient, head) as client:
        for i in range(0, len(body), 8):
            client.sendall(body[i : i + 8])
            time.sleep(ARRIVAL_S / 2)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    start = time.monotonic()
    status, answer = impatient.post("/v1/completions", {"prompt": [1, 5], "max_tokens": 12})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 12)
    assert time.monotonic() - start > ARRIVAL_S * 2


@pytest.mark.parametrize("more", [b"\r\n", b"GET /hea"])
def test_what_follows_a_request_does_not_cut_its_answer(impatient, more):
    body = b'{"prompt": [1, 5], "max_tokens": 12}'
    head = HEAD.replace(b"999", str(len(body)).encode()) + b"\r\n"
    with open_socket(impatient, head + body) as client:
        time.sleep(ARRIVAL_S / 4)
        start = time.monotonic()
        client.sendall(more)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert time.monotonic() - start > ARRIVAL_S * 1.5, "the answer should outlast the patience"


def test_idle_connections_keep_nobody_out(tmp_path, smollm2_path):
    """With a limit of open files that they would use up; answers that are under way are not cut for new ones."""
    few = (
        "-c", "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "runpy.run_module('tests.e2e.null_server', run_name='__main__')",
    )  # fmt: skip
    with ServerProcess(tmp_path / "log", str(smollm2_path), program=few) as server:
        stream = server.open_stream("/v1/completions", {"prompt": [1, 5], "max_tokens": 20})
        stream.wait_for(b"data: ")
        held = []
        for i in range(100):
            held.append(open_socket(server, HALF_SENT[i % len(HALF_SENT)]))
            if i % 10 == 0:
                assert server.health() == 200, i
        assert server.health() == 200
        assert b"data: [DONE]" in stream.rest()
        slow = {"prompt": [1, 5], "max_tokens": 40}
        streams = [server.open_stream("/v1/completions", slow) for _ in range(32)]
        heads = [first_bytes(stream.socket) for stream in streams]
        assert b"HTTP/1.1 200" in heads
        assert {*heads, b"HTTP/1.1 503", b""} == {b"HTTP/1.1 200", b"HTTP/1.1 503", b""}
        assert set(heads) != {b"HTTP/1.1 200"}, "all were taken"
        for one in (*held, *(stream.socket for stream in streams)):
            one.close()
        wait_until(lambda: server.health() == 200, 10, "room again")


def first_bytes(client: socket.socket) -> bytes:
    """Nothing for a connection that was reset: it was refused with its request unread."""
    try:
        return client.recv(12)
    except ConnectionError:
        return b""
