"""FileStore: files uploaded by clients or written by batches, in a folder. Their number and size are limited.

A file consists of NAME.data, its content, and NAME.json, its metadata. The metadata is written last and marks the content as
complete. A file belongs to its API key. Other keys, except the administrator's, get the same answer as for an unknown id. Disk
work runs on threads; the index belongs to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from server.batches.api_types import FileBody
from server.http.errors import BatchObjectNotFound, StorageFull


class Shares:
    """Division of a limit between `owners`, the server's API keys. Half of it is divided equally; each share is reserved.

    The other half is available to all. With two keys, one key may thus use 75 % of a limit; a single key may use all of it.
    Files of removed keys count against the limit, but not against any share."""

    def __init__(self, owners: Collection[str] = ()) -> None:
        self._owners = frozenset(owners)
        self.hint = ", with a share for each key" if len(self._owners) > 1 else ""  # behind a limit in messages

    def has_room(self, limit: int, used: Counter[str | None], owner: str | None, num: int) -> bool:
        """Return whether `owner` may use `num` more of `limit`. `used`: amount that each key already uses."""
        total, share = used.total() + num, max(1, limit // (2 * max(1, len(self._owners))))
        unused_by_others = sum(max(0, share - used[key]) for key in self._owners if key != owner)
        within_share = owner in self._owners and used[owner] + num <= share
        return total <= limit and (within_share or total <= limit - min(limit // 2, unused_by_others))


logger = logging.getLogger("oneloop.batch")

INPUT, OUTPUT = "batch", "batch_output"
ADMINISTRATOR = "administrator"  # as an owner


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of a file. `key`: digest of the request's key, equal in every process that uses the folder; None without keys."""

    key: str | None = None
    is_admin: bool = False

    def owns(self, key: str | None) -> bool:
        return self.is_admin or self.key == key


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    bytes: int
    created_at: int  # seconds since the epoch
    filename: str
    purpose: str
    owner: str | None
    expires_at: int | None = None

    @property
    def body(self) -> FileBody:
        return msgspec.convert(self, FileBody, from_attributes=True)


def new_id(kind: str) -> str:
    return f"{kind}{uuid.uuid4().hex}"


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to a file atomically: after a crash, the file has either `content` or its previous content."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class FileStore:
    """Store of files in a folder, which is read by the constructor. `max_bytes`: limit of all files together. `clock`: returns
    seconds since the epoch. An expired file is hidden even before it is deleted."""

    def __init__(
        self, folder: Path, *, max_files: int, max_bytes: int, shares: Shares | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.clock = clock
        self._shares = shares or Shares()
        self._folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files = {file.id: file for file in self._read()}
        self._reserved = Counter[str | None]()  # bytes of files that are being written, by owner

    def _read(self) -> Iterator[StoredFile]:
        whole: set[str] = set()
        for path in sorted(self._folder.glob("*.json")):
            try:
                file = StoredFile(**json.loads(path.read_text()))
                assert file.id == path.stem
                assert self.path(file.id).is_file()
            except (OSError, ValueError, TypeError, AssertionError):
                logger.warning("%s is not a stored file and is ignored", path)
                continue
            whole.add(file.id)
            yield file
        for path in self._folder.iterdir():
            if path.suffix in (".data", ".partial") and path.stem not in whole:
                path.unlink()  # of an upload that was cut off

    @property
    def num_bytes(self) -> int:
        return self._used_bytes().total()

    def _used_bytes(self) -> Counter[str | None]:
        used = self._reserved.copy()
        for file in self._files.values():
            used[file.owner] += file.bytes
        return used

    def path(self, id: str) -> Path:
        return self._folder / f"{id}.data"

    def find(self, id: str, owner: Owner) -> StoredFile:
        """Return the file `id` of `owner`. Raises BatchObjectNotFound."""
        file = self._files.get(id)
        if file is None or not owner.owns(file.owner) or self._is_over(file):
            raise BatchObjectNotFound("File", id)
        return file

    def __contains__(self, id: str) -> bool:
        return id in self._files

    def owned(self, owner: Owner) -> list[StoredFile]:
        """Return the files of `owner`, newest first."""
        found = [file for file in self._files.values() if owner.owns(file.owner) and not self._is_over(file)]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def check_room(self, owner: str | None, num_bytes: int, num_files: int = 1) -> None:
        """Raise StorageFull if `owner` may not store `num_files` more files of `num_bytes` bytes in all."""
        used_files = Counter(file.owner for file in self._files.values())
        if num_files and not self._shares.has_room(self._max_files, used_files, owner, num_files):
            raise StorageFull(
                f"this server keeps at most {self._max_files} files{self._shares.hint}; delete some, or raise "
                "--max-batch-files"
            )
        if not self._shares.has_room(self._max_bytes, self._used_bytes(), owner, num_bytes):
            raise StorageFull(
                f"this server keeps at most {self._max_bytes} bytes of files{self._shares.hint}; delete some, or raise "
                "--max-batch-bytes"
            )

    def reserve(self, owner: str | None, num_bytes: int) -> None:
        """Reserve `num_bytes` for data that is written outside the store. Raises StorageFull."""
        self.check_room(owner, num_bytes, 0)
        self.account(owner, num_bytes)

    def account(self, owner: str | None, num_bytes: int) -> None:
        """Count `num_bytes` stored outside the store as used by `owner`. Negative: bytes that were deleted."""
        self._reserved[owner] += num_bytes

    async def add(self, content: BinaryIO, file: StoredFile) -> StoredFile:
        """Store a copy of `content` with the metadata `file`. Return the metadata, completed. Raises StorageFull."""
        self.check_room(file.owner, file.bytes)
        self.account(file.owner, file.bytes)
        try:
            await asyncio.to_thread(self._write, content, file)
        finally:
            self.account(file.owner, -file.bytes)
        self._files[file.id] = file
        return file

    async def take(self, path: Path, file: StoredFile) -> StoredFile:
        """Move the file at `path` into the store, without checking limits, because its bytes were reserved. Return its metadata."""
        await asyncio.to_thread(self._move, path, file)
        self._files[file.id] = file
        return file

    async def delete(self, id: str, owner: Owner) -> None:
        """Delete the file `id` of `owner`. Raises BatchObjectNotFound."""
        self.find(id, owner)
        await self.remove(id)

    async def remove(self, id: str) -> None:
        del self._files[id]
        await asyncio.to_thread(self._remove, id)

    def expired(self) -> set[str]:
        return {file.id for file in self._files.values() if self._is_over(file)}

    def until_next_expiry(self) -> float | None:
        """Return the number of seconds until the next file expires; None if no file will expire."""
        times = [file.expires_at for file in self._files.values() if file.expires_at is not None]
        left = [at - now for at in times if at > (now := self.clock())]
        return min(left, default=None)

    def _is_over(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self.clock()

    def _write(self, content: BinaryIO, file: StoredFile) -> None:
        content.seek(0)
        with self.path(file.id).open("wb") as target:
            shutil.copyfileobj(content, target)
            target.flush()
            os.fsync(target.fileno())
        self._describe(file)

    def _move(self, path: Path, file: StoredFile) -> None:
        path.replace(self.path(file.id))
        self._describe(file)

    def _describe(self, file: StoredFile) -> None:
        write_whole(self._folder / f"{file.id}.json", json.dumps(asdict(file)).encode())

    def _remove(self, id: str) -> None:
        (self._folder / f"{id}.json").unlink(missing_ok=True)
        self.path(id).unlink(missing_ok=True)


class FileExpiry:
    """Task that deletes expired files. It wakes up when the next file expires, or when `look_again` is called.

    An expired file that an unfinished batch reads is hidden, and deleted when the batch has ended."""

    def __init__(self, files: FileStore, in_use: Callable[[], set[str]]) -> None:
        """Create the task. `in_use`: returns the ids of files that unfinished batches read."""
        self._files = files
        self._in_use = in_use
        self._changed = asyncio.Event()

    def look_again(self) -> None:
        """Wake the task up. Called when a file with an expiry was added, or a batch has ended."""
        self._changed.set()

    async def run(self) -> None:
        """Delete files as they expire, until cancelled."""
        while True:
            self._changed.clear()
            try:
                wait_s = await self._delete_expired()
            except OSError as error:
                logger.warning("expired files cannot be deleted: %s", error)
                wait_s = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)

    async def _delete_expired(self) -> float | None:
        """Delete expired files. Return the number of seconds until the next expiry; None if no file will expire."""
        for id in self._files.expired() - self._in_use():
            await self._files.remove(id)
            logger.info("%s has expired and is deleted", id)
        return self._files.until_next_expiry()
