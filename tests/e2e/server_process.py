"""A server in a process of its own, as a user would start it, on a free loopback port; ended by process id."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
SERVE = ("-m", "octavo", "serve")
NULL_SERVE = ("-m", "tests.e2e.null_server")
"""the same over the null engine of `tests/engine`: all of the server and the engine's loop, but no model"""


JSON = {"Content-Type": "application/json"}


class ServerProcess:
    """Starts at once; `ready` waits for the address. Use as a context manager."""

    def __init__(self, log: Path, *args: str, program: tuple[str, ...] = SERVE) -> None:
        self.log = log
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *program, *args, "--port", "0"], stdout=subprocess.PIPE, stderr=stderr, env=env,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.host, self.port, self.engine = "", 0, psutil.Process()

    def __enter__(self) -> ServerProcess:
        return self.ready()

    def __exit__(self, *exc: object) -> None:
        children = self._children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)  # two signals at once may be one
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(10)
        for child in children:
            if child.is_running():
                child.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def ready(self) -> ServerProcess:
        """Reads the address that the server prints. It never starts serving later than its test's timeout."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if b"chat page" in line:
                address = urlsplit(line.split()[-1].decode())
                self.host, self.port = str(address.hostname), int(address.port or 0)
                self.ready_engine()
                return self
        raise AssertionError(f"the server did not start:\n{self.log.read_text()}")

    def ready_engine(self) -> psutil.Process:
        """The engine that runs now."""
        self.engine = self._children()[0]
        return self.engine

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 60
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of one request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            data = body if body is None or isinstance(body, bytes) or hasattr(body, "__next__") else json.dumps(body)
            given = (JSON if body is not None else {}) | (headers or {})
            connection.request(method, path, data, given, encode_chunked=hasattr(body, "__next__"))
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return response.status, names, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        status, _, answer = self.call("POST", path, body, headers)
        return status, json.loads(answer)

    def health(self) -> int:
        """The status, 0 when nobody answers."""
        try:
            return self.call("GET", "/health")[0]
        except OSError:
            return 0

    def metrics(self) -> dict[str, float]:
        """Sample names without labels, summed over them."""
        text = self.call("GET", "/metrics")[2].decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def open_stream(
        self, path: str, body: Any, receive_buffer: int | None = None, headers: dict[str, str] | None = None
    ) -> RawStream:
        return RawStream(self.host, self.port, path, {**body, "stream": True}, receive_buffer, headers)


class RawStream:
    """An HTTP stream on a bare socket, to be read, left unread, or cut at will."""

    def __init__(
        self, host: str, port: int, path: str, body: Any, receive_buffer: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60)
        self.socket.connect((host, port))
        data = json.dumps(body).encode()
        fields = {"Host": host, "Connection": "close", "Content-Length": len(data), **JSON, **(headers or {})}
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.socket.sendall(head.encode() + b"\r\n" + data)

    def wait_for(self, text: bytes) -> bytes:
        """What has come once `text` is in it."""
        got = b""
        while text not in got:
            part = self.socket.recv(65536)
            assert part, f"the stream ended before {text!r}: {got[-1000:]!r}"
            got += part
        return got

    def rest(self) -> bytes:
        got = b""
        while part := self.socket.recv(65536):
            got += part
        self.socket.close()
        return got

    def cut(self) -> None:
        """Resets the connection, as a client that is killed does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()


def events(raw: bytes) -> Iterator[Any]:
    """The parsed `data:` lines of a stream; "[DONE]" as that text."""
    for line in raw.split(b"\n"):
        line = line.strip()
        if line.startswith(b"data: "):
            yield "[DONE]" if line == b"data: [DONE]" else json.loads(line[6:])


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until `condition` held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - start
