"""Disk tier: KV entries in files, one file per entry, that outlive the process.

A file is written under a temporary name and renamed, so it is never incomplete under its final name. A damaged file is detected
by its header and checksum. A bad or missing file raises nothing: it is a cache miss and a line of the log. The index is the
listing of the folder. It is read at the start and again later, since several servers may share the folder. Each model has its
own folder, named by the model's fingerprint. The header of each file repeats the fingerprint."""

from __future__ import annotations

import logging
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from zlib import crc32

from runtime.kv.prefix_cache import BlockHash
from runtime.tiers.host import Key

log = logging.getLogger("oneloop.engine")

_MAGIC = b"oneloop KV 1\n\0\0\0"
_HEADER = struct.Struct("<16s32s32sIIQ")  # magic, fingerprint, name, group, checksum, bytes
_SUFFIX, _UNFINISHED = ".kv", ".tmp"
_ABANDONED_S = 3600.0  # age after which a file under its first name has no writer any more
_RESCAN_SHARE = 1 / 16  # of the maximum size: written since the folder was listed last
_WARN_EVERY_S = 60.0


class _File(NamedTuple):
    path: Path
    num_bytes: int


class DiskTier:
    """KV entries of one model in `folder`, at most about `max_bytes`. `in` can be used on any thread. All other methods are slow
    and must be called on threads other than the event loop's."""

    def __init__(self, folder: Path, fingerprint: bytes, max_bytes: int) -> None:
        """Create the folder if needed, readable by its owner only, and list its files. Raises OSError if that fails."""
        self.max_bytes = max_bytes
        self.num_errors = 0  # files that could not be read or written
        self._fingerprint = fingerprint
        self._folder = folder / fingerprint.hex()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files: OrderedDict[Key, _File] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._num_written = 0  # bytes since the last listing
        self._numbers = count()
        self._lock = Lock()
        self._warned_s = 0.0
        self._scan()

    def __contains__(self, key: object) -> bool:
        return key in self._files

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def read(self, key: Key, pages: Sequence[memoryview]) -> bool:
        """Read the entry `key` into `pages`. Return False if there is no valid entry; the content of `pages` is then undefined."""
        file = self._files.get(key)
        if file is None:
            return False
        try:
            with file.path.open("rb", buffering=0) as stream:
                header = stream.read(_HEADER.size)
                checksum = 0
                for page in pages:
                    if stream.readinto(page) != len(page):
                        raise ValueError("it is too short")
                    checksum = crc32(page, checksum)
                if header != self._header(key, pages, checksum):
                    raise ValueError("its header or checksum does not match")
                if stream.read(1):
                    raise ValueError("it is too long")
            os.utime(file.path)
        except FileNotFoundError:  # another server that shares the folder has evicted it
            self._forget(key)
            return False
        except (OSError, ValueError) as error:
            self._warn("read", file.path, error)
            self._forget(key)
            if isinstance(error, ValueError):
                file.path.unlink(missing_ok=True)
            return False
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
        return True

    def write(self, key: Key, pages: Sequence[bytes | memoryview]) -> bool:
        """Write an entry, and evict others if the maximum size is exceeded. Return False if writing failed."""
        if key in self._files:
            return True
        path, checksum = self._path(key), 0
        for page in pages:
            checksum = crc32(page, checksum)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}-{next(self._numbers)}{_UNFINISHED}")
        num_bytes = _HEADER.size + sum(len(page) for page in pages)
        try:
            self._make_room(num_bytes)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._write(unfinished, [self._header(key, pages, checksum), *pages])
            unfinished.replace(path)
        except OSError as error:
            self._warn("written", path, error)
            try:
                unfinished.unlink(missing_ok=True)
            except OSError:
                log.debug("%s is left", unfinished, exc_info=True)
            return False
        self._note(key, _File(path, num_bytes))
        self._num_written += num_bytes
        return True

    def _write(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        with open(path, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[stream.write(left) :]

    def _header(self, key: Key, pages: Sequence[bytes | memoryview], checksum: int) -> bytes:
        group, name = key
        num_bytes = sum(len(page) for page in pages)
        return _HEADER.pack(_MAGIC, self._fingerprint, name, group, checksum, num_bytes)

    def _path(self, key: Key) -> Path:
        group, name = key
        return self._folder / name.hex()[:2] / f"{name.hex()}-{group}{_SUFFIX}"

    # --- the index ------------------------------------------------------------------------------------------------

    def _note(self, key: Key, file: _File) -> None:
        with self._lock:
            if (before := self._files.pop(key, None)) is not None:
                self._num_bytes -= before.num_bytes
            self._files[key] = file
            self._num_bytes += file.num_bytes

    def _forget(self, key: Key) -> None:
        with self._lock:
            if (file := self._files.pop(key, None)) is not None:
                self._num_bytes -= file.num_bytes

    def _make_room(self, num_bytes: int) -> None:
        if self._num_written > self.max_bytes * _RESCAN_SHARE:
            self._scan()
        while self._files and self._num_bytes + num_bytes > self.max_bytes:
            key, file = next(iter(self._files.items()))
            file.path.unlink(missing_ok=True)
            self._forget(key)

    def _scan(self) -> None:
        """List the folder, oldest files first, and remove temporary files of processes that were killed."""
        self._num_written = 0
        found: list[tuple[float, Key, _File]] = []
        for path in self._folder.glob("*/*"):
            try:
                status = path.stat()
            except OSError:
                continue  # it went meanwhile
            if path.suffix == _UNFINISHED:
                if time.time() - status.st_mtime > _ABANDONED_S:
                    path.unlink(missing_ok=True)
            elif (key := _key_of(path)) is not None:
                found.append((status.st_mtime, key, _File(path, status.st_size)))
        with self._lock:
            self._files = OrderedDict((key, file) for _, key, file in sorted(found))
            self._num_bytes = sum(file.num_bytes for file in self._files.values())

    def _warn(self, what: str, path: Path, error: Exception) -> None:
        """Count the error and log it, at most once a minute: if the disk is full, every entry fails."""
        self.num_errors += 1
        now = time.monotonic()
        if not self._warned_s or now - self._warned_s > _WARN_EVERY_S:
            self._warned_s = now
            log.warning("--kv-disk: %s cannot be %s (%s); the prompt is computed instead", path.name, what, error)


def _key_of(path: Path) -> Key | None:
    name, _, group = path.stem.partition("-")
    if path.suffix != _SUFFIX or len(name) != 64 or not group.isascii() or not group.isdigit():
        return None
    try:
        return int(group), BlockHash(bytes.fromhex(name))
    except ValueError:
        return None
