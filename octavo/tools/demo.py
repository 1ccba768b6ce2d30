"""`make demo`: starts a server, asks it one question over HTTP, shows the answer as it streams, and ends it."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

QUESTION = "Explain in two sentences what a library is."
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0


def main(argv: list[str]) -> int:
    """`argv` is the model, then flags for the server."""
    port = _free_port()
    command = [sys.executable, "-m", "octavo", "serve", *(argv or ["smollm2"]), "--port", str(port)]
    if sys.stderr.isatty():  # there a bar shows how far loading has come, elsewhere the log does
        command += ["--log-level", "warning"]
    with subprocess.Popen(command) as server:
        try:
            if not _wait_until_ready(server, port):
                return server.returncode or 1
            print(f"\n> {QUESTION}\n", flush=True)
            return _ask(port)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _wait_until_ready(server: subprocess.Popen[bytes], port: int) -> bool:
    """False when the server ended or the time ran out."""
    end = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return True
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    return False


def _ask(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_TIMEOUT_S)
    body = {
        "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 120, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    asked = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        print(f"error: status {response.status}: {response.read().decode()}", file=sys.stderr)
        return 1
    times, tokens = [], 0
    for event in _events(response):
        if "error" in event:
            print(f"error: {event['error']}", file=sys.stderr)
            return 1
        for choice in event["choices"]:
            if choice["delta"].get("content"):
                times.append(time.perf_counter())
                print(choice["delta"]["content"], end="", flush=True)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    connection.close()
    if tokens < 2 or len(times) < 2:
        print(f"error: only {tokens} tokens came", file=sys.stderr)
        return 1
    rate = (tokens - 1) / (times[-1] - times[0])
    print(f"\n\n[{tokens} tokens, {rate:.1f} tokens/s, first after {times[0] - asked:.2f} s]", flush=True)
    return 0


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE]."""
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data and data != b"[DONE]":
            yield json.loads(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
