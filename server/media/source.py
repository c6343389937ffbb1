"""Sources of a media part's bytes: the request itself, a remote host, or a local folder."""

from __future__ import annotations

import base64
import os
import re
import stat
from io import FileIO
from pathlib import Path
from typing import Final
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from server.http.errors import InvalidMedia
from server.media.fetch import Fetcher, too_large
from server.media.part import Base64, Given, MediaPart

_BASE64_HEAD: Final = re.compile(r"data:[^,;]*(;[^,;]*)*;base64,", re.IGNORECASE)
_PIECE_CHARS: Final = 1 << 18  # of base64, a third of a millisecond, in which no other thread moves
_SPACE: Final = str.maketrans("", "", " \t\r\n")


class Sources:
    """Reader of the bytes of media parts. `folder`: root folder of file: URLs, or None to reject file: URLs."""

    def __init__(self, fetcher: Fetcher, folder: str | None, max_bytes: int) -> None:
        self._fetcher = fetcher
        self._folder = None if folder is None else Path(folder).resolve()
        self._max_bytes = max_bytes

    @staticmethod
    def is_remote(part: MediaPart) -> bool:
        """Return True if the part's bytes must be downloaded with `fetch`, and False if `read` returns them."""
        return not isinstance(part.source, Base64 | Given) and _scheme(part.source.url) in ("http", "https")

    async def fetch(self, part: MediaPart) -> bytes:
        """Download a remote part and return its bytes. Raises InvalidMedia."""
        assert not isinstance(part.source, Base64 | Given), "it is remote"
        return await self._fetcher.fetch(part.source.url, part.where)

    def read(self, part: MediaPart) -> bytes:
        """Return the bytes of a part that is not remote. This blocks for about 1 ms per MB. Raises InvalidMedia."""
        source, where = part.source, part.where
        if isinstance(source, Given):
            value = bytes(source.value)
            if len(value) > self._max_bytes:
                raise too_large(self._max_bytes, where)
            return value
        if isinstance(source, Base64):
            return base64_bytes(source.text, where, self._max_bytes)
        scheme = _scheme(source.url)
        if scheme == "data":
            return self._data(source.url, where)
        if scheme == "file":
            return self._file(source.url, where)
        raise InvalidMedia("a URL must begin with data:, http://, https:// or file://", where)

    def _data(self, url: str, where: str) -> bytes:
        head = _BASE64_HEAD.match(url)
        if head is not None:
            return base64_bytes(url[head.end() :], where, self._max_bytes)
        _, comma, text = url.partition(",")
        if not comma:
            raise InvalidMedia("the data URL has no comma, and so no data", where)
        if not text.isascii():
            raise InvalidMedia("the URL contains invalid characters", where)
        if len(text) > 3 * self._max_bytes:
            raise too_large(self._max_bytes, where)
        data = unquote_to_bytes(text)
        if len(data) > self._max_bytes:
            raise too_large(self._max_bytes, where)
        return _not_empty(data, where)

    def _file(self, url: str, where: str) -> bytes:
        if self._folder is None:
            raise InvalidMedia("file URLs are disabled: start the server with --allowed-local-media-path", where)
        try:
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost") or "\x00" in unquote(parts.path):
                raise InvalidMedia("a file URL needs an absolute path: file:///folder/name", where)
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not path.is_relative_to(self._folder):
                raise _no_such_file(where)
            with open(path, "rb", buffering=0, opener=_opener) as file:
                return self._opened(file, where)
        except (OSError, RuntimeError, ValueError):
            raise _no_such_file(where) from None

    def _opened(self, file: FileIO, where: str) -> bytes:
        assert self._folder is not None, "it was looked up there"
        facts = os.fstat(file.fileno())
        # A folder on the way may have become a link meanwhile: what was opened says where it is.
        opened = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        if not stat.S_ISREG(facts.st_mode) or not opened.is_relative_to(self._folder):
            raise _no_such_file(where)
        if facts.st_size > self._max_bytes:
            raise too_large(self._max_bytes, where)
        return _not_empty(file.readall(), where)


def base64_bytes(text: str, where: str, max_bytes: int) -> bytes:
    """Decode the base64 string `text` to at most `max_bytes` bytes. Raises InvalidMedia for the field `where`."""
    max_chars = 4 * (max_bytes // 3 + 1)
    if "\n" in text or " " in text:  # lines, as mail has them
        text = _without_space(text, max_chars)
    if len(text) > max_chars:
        raise too_large(max_bytes, where)
    try:
        if len(text) % 4 or -1 < text.find("=") < len(text) - 2:
            raise ValueError("it ends within a group, or before its end")
        pieces = [
            base64.b64decode(text[start : start + _PIECE_CHARS], validate=True)
            for start in range(0, len(text), _PIECE_CHARS)
        ]
    except ValueError:
        raise InvalidMedia("its data is not base64", where) from None
    return _not_empty(b"".join(pieces), where)


def _no_such_file(where: str) -> InvalidMedia:
    """Return the error for a file that is missing or outside the folder. Both have the same error, so clients cannot probe for
    files."""
    return InvalidMedia("there is no such file below the folder of --allowed-local-media-path", where)


def _not_empty(data: bytes, where: str) -> bytes:
    if not data:
        raise InvalidMedia("the data is empty", where)
    return data


def _without_space(text: str, max_chars: int) -> str:
    pieces, num_chars = [], 0
    for start in range(0, len(text), _PIECE_CHARS):
        pieces.append(text[start : start + _PIECE_CHARS].translate(_SPACE))
        num_chars += len(pieces[-1])
        if num_chars > max_chars:
            break
    return "".join(pieces)


def _opener(path: str, flags: int) -> int:
    """Open a file without following a symbolic link, and without blocking on a named pipe. Return the file descriptor."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _scheme(url: str) -> str:
    return url[:8].partition(":")[0].lower()
