"""Keys, bounds, ids, methods and templates: what the server says before the engine hears of a request."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import pytest

from tests.e2e.server_process import NULL_SERVE, RawStream, ServerProcess, events
from tests.matrix import SEED, sample

RNG = random.Random(f"{SEED}/rules")
COMPLETION = {"prompt": [9, 5, 6], "max_tokens": 3}
KEYS = ("key-" + "".join(RNG.choices("abcdef0123456789", k=20)), "schlüssel")
LIMIT = 2000
BOMBS = (
    "{% for i in range(999999999) %}x{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception('not this way') }}",
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, smollm2_path) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("guarded") / "log"
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    flags = ["--max-body-bytes", str(LIMIT), "--allowed-origins", "http://there.example", "--enable-log-requests"]
    with ServerProcess(log, str(smollm2_path), *keys, *flags, program=NULL_SERVE) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}".encode().decode("latin-1")}


@pytest.mark.parametrize("headers", [
    {}, bearer("wrong"), bearer(""), {"Authorization": KEYS[0]}, {"Authorization": f"Basic {KEYS[0]}"},
    bearer(KEYS[0][:-1]), bearer(KEYS[0] + "x"),
])  # fmt: skip
def test_without_a_key_v1_is_closed(guarded, headers):
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/nothing")):
        status, _, body = guarded.call(method, path, None, headers)
        assert (status, json.loads(body)) == (401, {"error": "Unauthorized"})


@pytest.mark.parametrize("key", KEYS)
def test_with_any_of_the_keys_it_opens(guarded, key):
    status, answer = guarded.post("/v1/completions", COMPLETION, bearer(key))
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/load", "/"])
def test_probes_and_the_page_need_no_key(guarded, path):
    assert guarded.call("GET", path)[0] == 200


def test_version_tells_the_default_sampling_values(guarded):
    found = json.loads(guarded.call("GET", "/version")[2])["default_sampling"]
    assert set(found) - {"max_tokens"} == {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    assert all(isinstance(value, (int, float)) for value in found.values())


def test_a_body_over_the_limit_is_413_however_it_comes(guarded):
    fits = json.dumps(COMPLETION).encode().ljust(LIMIT)
    assert guarded.call("POST", "/v1/completions", fits, bearer(KEYS[0]))[0] == 200
    status, _, body = guarded.call("POST", "/v1/completions", fits + b" ", bearer(KEYS[0]))
    assert (status, json.loads(body)["error"]["code"]) == (413, 413)
    assert str(LIMIT) in json.loads(body)["error"]["message"]
    chunks = (fits[i : i + 100] for i in range(0, LIMIT, 100))
    assert guarded.call("POST", "/v1/completions", chunks, bearer(KEYS[0]))[0] == 200
    chunks = iter([*(fits[i : i + 100] for i in range(0, LIMIT, 100)), b" "])
    assert guarded.call("POST", "/v1/completions", chunks, bearer(KEYS[0]))[0] == 413


def test_paths_and_methods_that_there_are_not(guarded):
    for method, path, expected in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)):
        status, _, body = guarded.call(method, path, None, bearer(KEYS[0]))
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (expected, expected)
        assert path in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_only_json_is_taken_for_json(guarded, path):
    """Other types a page of any origin may post without asking first."""
    for wrong in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        headers = bearer(KEYS[0]) | {"Content-Type": wrong}
        status, _, body = guarded.call("POST", path, COMPLETION | {"tokens": [1], "messages": []}, headers)
        assert (status, json.loads(body)["error"]["code"]) == (415, 415)
        assert "application/json" in json.loads(body)["error"]["message"]
    right = bearer(KEYS[0]) | {"Content-Type": "Application/JSON; charset=utf-8"}
    assert guarded.call("POST", path, COMPLETION | {"tokens": [1], "messages": []}, right)[0] in (200, 400)


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/", "/v1/models"])
def test_head_is_get_without_the_body(guarded, path):
    answers = [guarded.call(method, path, None, bearer(KEYS[0])) for method in ("GET", "HEAD")]
    assert [status for status, _, _ in answers] == [200, 200]
    assert answers[1][2] == b""
    assert answers[0][1].keys() == answers[1][1].keys()
    assert guarded.call("HEAD", "/v1/completions", None, bearer(KEYS[0]))[0] == 405


def test_request_ids_are_taken_when_harmless(guarded):
    for given in ("abc-123", "a" * 128):
        headers = bearer(KEYS[0]) | {"X-Request-Id": given}
        _, names, body = guarded.call("POST", "/v1/completions", COMPLETION, headers)
        assert names["x-request-id"] == given
        assert json.loads(body)["id"] == f"cmpl-{given}"
    for given in ("a" * 129, "a b", "<script>", "\xe4"):
        _, names, body = guarded.call("GET", "/health", None, {"X-Request-Id": given})
        assert names["x-request-id"].isalnum()
    for given, status in (("mine", 200), ("not mine\n", 400)):
        body = COMPLETION | {"request_id": given}
        assert guarded.post("/v1/completions", body, bearer(KEYS[0]))[0] == status


def test_two_requests_may_bear_one_id(guarded):
    headers, body = bearer(KEYS[0]) | {"X-Request-Id": "same"}, {"prompt": [1, 5], "max_tokens": 3}
    streams = [guarded.open_stream("/v1/completions", body, headers=headers) for _ in range(2)]
    for stream in streams:
        assert list(events(stream.rest()))[-1] == "[DONE]"


def test_browsers_may_call_from_the_origins_that_were_named(guarded):
    for origin, allowed in (("http://there.example", True), ("http://else.example", False)):
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        status, names, _ = guarded.call("OPTIONS", "/v1/completions", None, preflight)
        assert (status == 200, names.get("access-control-allow-origin") == origin) == (allowed, allowed)


def test_the_page_needs_no_other_host(guarded):
    status, names, body = guarded.call("GET", "/")
    text = body.decode()
    assert status == 200
    assert names["content-type"].startswith("text/html")
    assert "innerHTML" not in text
    outside = [part.split('"')[0] for part in text.split("http")[1:]]
    assert all(part.startswith("://www.w3.org/") for part in outside), outside


def test_health_of_an_engine_that_is_stopped(tmp_path, smollm2_path):
    with ServerProcess(tmp_path / "log", str(smollm2_path), program=NULL_SERVE) as server:
        assert server.health() == 200
        server.engine.suspend()
        start = time.monotonic()
        while (found := server.call("GET", "/health"))[0] == 200:
            assert time.monotonic() - start < 4
        assert time.monotonic() - start < 4
        assert found[0] == 503
        assert "the engine has not stepped for" in json.loads(found[2])["error"]["message"]
        server.engine.resume()
        assert server.health() == 200


def test_health_does_not_flap_in_a_long_step(tmp_path, smollm2_path):
    with ServerProcess(tmp_path / "log", str(smollm2_path), program=NULL_SERVE) as server:
        stuck = RawStream(server.host, server.port, "/v1/completions", {"prompt": [4], "max_tokens": 5})
        time.sleep(0.3)
        for _ in range(4):
            start = time.monotonic()
            assert server.health() == 200
            assert 0.5 < time.monotonic() - start < 3, "the engine answered, so it is in no step"
        server.engine.kill()
        assert b'"code":503' in stuck.rest()
        assert server.health() in (0, 503)


@pytest.mark.parametrize("template", sample(BOMBS, 2))
def test_templates_that_loop_or_reach_too_far_are_a_400(tmp_path, smollm2_path, template):
    flags = ("--chat-template", template)
    with ServerProcess(tmp_path / "log", str(smollm2_path), *flags, program=NULL_SERVE) as server:
        start = time.monotonic()
        status, answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
        assert status == 400, answer
        assert "\n" not in answer["error"]["message"]
        assert time.monotonic() - start < 10
        assert server.health() == 200
        assert "Traceback" not in server.log.read_text()
