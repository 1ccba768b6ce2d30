"""Adapters over HTTP: loaded, asked for by name, replaced and unloaded while requests run, on a real model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator

import pytest

from tests.e2e.server_process import NULL_SERVE, ServerProcess, events, wait_until
from tests.lora_fixtures import damage, write_adapter
from tests.matrix import SEED

KEY = {"Authorization": "Bearer sesame"}
ASKED = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, smollm2_path):
    made = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("one", "two", "bad")):
        write_adapter(made / name, smollm2_path, number, rank=16, strength=1.0)
    damage(made / "bad", random.Random(SEED), "shape")
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2_path, folder) -> Iterator[ServerProcess]:
    start = json.dumps({"name": "start", "path": str(folder / "one")})
    flags = ["--served-model-name", "smollm2", "--max-model-len", "1024", "--api-key", "sesame", "--enable-lora",
             "--lora-modules", start, "--max-loras", "3", "--engine-restarts", "1"]  # fmt: skip
    with ServerProcess(tmp_path_factory.mktemp("lora") / "log", str(smollm2_path), *flags) as running:
        yield running


def load(server, name, path, **more):
    body = {"lora_name": name, "lora_path": str(path), **more}
    status, _, answer = server.call("POST", "/v1/load_lora_adapter", body, KEY)
    return status, answer.decode()


def unload(server, name):
    status, _, answer = server.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, KEY)
    return status, answer.decode()


def text_of(server, model):
    status, answer = server.post("/v1/completions", {**ASKED, "model": model}, KEY)
    assert status == 200, answer
    assert answer["model"] == model
    return answer["choices"][0]["text"]


def error_of(answer):
    error = json.loads(answer)["error"]
    assert "\n" not in error["message"]
    return error["type"], error["message"]


def test_the_life_of_adapters(server, folder):
    base, start = text_of(server, "smollm2"), text_of(server, "start")
    assert base != start
    assert load(server, "other", folder / "two") == (200, "Success: LoRA adapter 'other' added successfully.")
    other = text_of(server, "other")
    assert other not in (base, start)
    status, again = load(server, "other", folder / "two")
    assert status == 400 and error_of(again) == (
        "InvalidUserInput",
        "The lora adapter 'other' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True.",
    )
    cards = {card["id"]: card for card in json.loads(server.call("GET", "/v1/models", headers=KEY)[2])["data"]}
    assert list(cards) == ["smollm2", "start", "other"]
    assert (cards["other"]["root"], cards["other"]["parent"]) == (str(folder / "two"), "smollm2")
    assert cards["smollm2"]["parent"] is None
    stream = server.open_stream("/v1/completions", {**ASKED, "model": "other", "max_tokens": 100}, headers=KEY)
    got = stream.wait_for(b'"text"')
    assert load(server, "other", folder / "one", load_inplace=True)[0] == 200
    assert text_of(server, "other") == start, "the same weights under another name, and no keys of the old ones"
    assert unload(server, "other") == (200, "Success: LoRA adapter 'other' removed successfully.")
    assert server.post("/v1/completions", {**ASKED, "model": "other"}, KEY)[0] == 404
    told = list(events(got + stream.rest()))
    assert told[-1] == "[DONE]" and told[-2]["choices"][0]["finish_reason"] == "length"
    assert "".join(e["choices"][0]["text"] for e in told[:-1]).startswith(other), "it kept its weights"
    assert unload(server, "other")[0] == 404
    assert error_of(unload(server, "other")[1]) == (
        "NotFoundError",
        "The lora adapter 'other' cannot be found. Loaded: start.",
    )
    assert text_of(server, "smollm2") == base


def test_what_cannot_be_loaded_is_one_line_and_harms_nothing(server, folder, tmp_path):
    shutil.copytree(folder / "two", tmp_path / "dora")
    damage(tmp_path / "dora", random.Random(SEED), '{"use_dora": true}')
    said = {
        ("a", folder / "gone"): (404, "no such folder"), ("a", folder): (404, "adapter_config.json is missing"),
        ("a", folder / "bad"): (400, "has shape"), ("a", tmp_path / "dora"): (400, "'use_dora' is True"),
        ("", folder / "two"): (400, "Both 'lora_name' and 'lora_path' must be provided."),
        ("a", ""): (400, "Both 'lora_name'"), ("smollm2", folder / "two"): (400, "is the model's own"),
        ("a\nb", folder / "two"): (400, "lora_name is"), ("a", "x\0y"): (400, "null character"),
        ("a", "/dev/null"): (404, "no such folder"),
    }  # fmt: skip
    for (name, path), (status, words) in said.items():
        found = load(server, name, path)
        assert found[0] == status and words in error_of(found[1])[1], (name, path, found)
    assert load(server, "a", folder / "two", is_3d_lora_weight=True)[0] == 400
    for name in ("a", "b"):
        assert load(server, name, folder / "two")[0] == 200
    full = load(server, "c", folder / "two")
    assert full[0] == 400 and "limit: --max-loras 3" in error_of(full[1])[1]
    assert {unload(server, name)[0] for name in ("a", "b")} == {200}
    assert text_of(server, "start")


def test_a_key_is_needed(server, folder):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert server.call("POST", path, {"lora_name": "a", "lora_path": str(folder / "two")})[0] == 401


def test_metrics_name_the_adapters_that_run(server):
    stream = server.open_stream("/v1/completions", {**ASKED, "model": "start", "max_tokens": 300}, headers=KEY)
    stream.wait_for(b'"text"')
    text = server.call("GET", "/metrics")[2].decode()
    stream.cut()
    line = next(line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{"))
    assert 'max_lora="3"' in line and 'running_lora_adapters="start"' in line and 'waiting_lora_adapters=""' in line


def test_an_engine_that_is_started_again_has_them_again(server, folder):
    assert load(server, "late", folder / "two")[0] == 200
    before = {name: text_of(server, name) for name in ("smollm2", "start", "late")}
    dead = server.engine
    dead.kill()
    wait_until(lambda: not dead.is_running() and server.health() == 200, 60, "a new engine")
    assert {name: text_of(server, name) for name in before} == before
    assert unload(server, "late")[0] == 200


def test_without_enable_lora_adapters_are_off(tmp_path, smollm2_path):
    with ServerProcess(tmp_path / "log", str(smollm2_path), program=NULL_SERVE) as plain:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            status, _, answer = plain.call("POST", path, {"lora_name": "a", "lora_path": "/"})
            assert status == 404
            assert json.loads(answer)["error"]["message"] == f"{path}: adapters are off; fix: start with --enable-lora"
        assert "lora_requests_info" not in plain.call("GET", "/metrics")[2].decode()
