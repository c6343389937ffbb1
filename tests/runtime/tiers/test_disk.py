from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from runtime.kv.prefix_cache import BlockHash
from runtime.tiers.disk import DiskTier
from runtime.tiers.folder import folder_key
from tests.tiers import on_push

MODEL, OTHER_MODEL = bytes(32), bytes(31) + b"1"
PAGE_BYTES, NUM_PAGES = 64 << 10, 2


def key(number: int) -> tuple[int, BlockHash]:
    return number % 2, BlockHash(sha256(str(number).encode()).digest())


def pages(number: int) -> list[memoryview]:
    return [memoryview(bytearray(random.Random(f"{number} {page}").randbytes(PAGE_BYTES))) for page in range(NUM_PAGES)]


def blank() -> list[memoryview]:
    return [memoryview(bytearray(PAGE_BYTES)) for _ in range(NUM_PAGES)]


def tier(folder: Path, max_bytes: int = 1 << 30, model: bytes = MODEL) -> DiskTier:
    return DiskTier(folder, model, max_bytes)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*"))


def test_a_new_process_reads_what_an_old_one_wrote(tmp_path):
    assert tier(tmp_path).write(key(1), pages(1))
    read = blank()
    assert tier(tmp_path).read(key(1), read)
    assert read == pages(1)


def test_only_the_owner_can_read_the_folder(tmp_path):
    folder = tmp_path / "kv"
    folder_key(folder)
    tier(folder).write(key(1), pages(1))
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_servers_that_share_a_folder_have_one_key(tmp_path):
    assert len({folder_key(tmp_path) for _ in range(3)}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda data: data + b"x",
                                    lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:],
                                    lambda data: data[:20] + b"another!" + data[28:]])  # fmt: skip
def test_a_torn_or_foreign_file_is_a_miss_and_is_removed(tmp_path, change):
    tier(tmp_path).write(key(1), pages(1))
    (path,) = files(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    again = tier(tmp_path)
    assert not again.read(key(1), blank())
    assert key(1) not in again
    assert not files(tmp_path)
    assert again.num_errors == 1


def test_another_model_finds_nothing(tmp_path):
    tier(tmp_path).write(key(1), pages(1))
    assert key(1) not in tier(tmp_path, model=OTHER_MODEL)


def test_a_file_that_was_moved_from_another_model_is_a_miss(tmp_path):
    tier(tmp_path).write(key(1), pages(1))
    (path,) = files(tmp_path)
    tier(tmp_path, model=OTHER_MODEL).write(key(2), pages(2))
    moved = tmp_path / OTHER_MODEL.hex() / path.parent.name / path.name
    moved.parent.mkdir(exist_ok=True)
    path.rename(moved)
    assert not tier(tmp_path, model=OTHER_MODEL).read(key(1), blank())


def test_the_least_recently_used_files_go_at_the_limit(tmp_path):
    size = NUM_PAGES * PAGE_BYTES + 4096
    disk = tier(tmp_path, 3 * size)
    for number in range(3):
        disk.write(key(number), pages(number))
    disk.read(key(0), blank())
    disk.write(key(3), pages(3))
    assert [key(number) in disk for number in range(4)] == [True, False, True, True]
    assert disk.num_bytes <= 3 * size
    assert len(files(tmp_path)) == 3


def test_a_file_that_another_server_evicted_is_a_miss(tmp_path):
    one, other = tier(tmp_path), tier(tmp_path)
    one.write(key(1), pages(1))
    other.write(key(1), pages(1))
    files(tmp_path)[0].unlink()
    assert not one.read(key(1), blank())
    assert one.num_errors == 0
    assert other.write(key(2), pages(2))


class FullDisk(DiskTier):
    """Has room for half a page."""

    def _write(self, path: Path, parts) -> None:
        super()._write(path, [parts[0], parts[1][: PAGE_BYTES // 2]])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_nothing_and_warns_once(tmp_path, caplog):
    disk = FullDisk(tmp_path, MODEL, 1 << 30)
    assert not any(disk.write(key(number), pages(number)) for number in range(3))
    assert key(0) not in disk
    assert not files(tmp_path)
    assert disk.num_errors == 3
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_a_folder_that_went_is_a_miss(tmp_path):
    disk = tier(tmp_path)
    disk.write(key(1), pages(1))
    (path,) = files(tmp_path)
    path.unlink()
    path.parent.rmdir()
    path.parent.parent.rmdir()
    assert not disk.read(key(1), blank())
    assert not disk.write(key(2), pages(2))


WRITER = """
import sys
from pathlib import Path
from tests.runtime.tiers.test_disk import key, pages, tier
disk = tier(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 1 << 20):
    disk.write(key(number), pages(number))
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_kills", on_push([3, 200], 3))
def test_a_writer_that_is_killed_leaves_whole_files(tmp_path, num_kills):
    rng, written = random.Random(num_kills), 0
    for _ in range(num_kills):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(written)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(rng.randint(1, 8)):
            written = int(writer.stdout.readline()) + 1
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        again = tier(tmp_path)
        assert all(key(number) in again for number in range(written))
        for path in files(tmp_path):  # those under their last names are whole
            assert path.suffix == ".tmp" or path.stat().st_size == NUM_PAGES * PAGE_BYTES + 96
    read = blank()
    for number in range(written):
        assert again.read(key(number), read)
        assert read == pages(number)
    assert again.num_errors == 0
