"""Connection: between the process whose loop is in charge of a model and one that computes another stage of it.

Only who knows the model's secret may open it. Messages (`messages.py`) go as plain data, each behind its length in bytes."""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import Callable
from typing import Any, cast

from runtime.parallel.plain_data import packed, unpacked

_SIZE = struct.Struct("<Q")


class Connection(asyncio.Protocol):
    """One end of it, on the loop. `on_message`: called with each; `on_lost`: once, when nothing more will come. Who has connected
    says the secret first, and only then the other one."""

    def __init__(
        self, secret: bytes, on_message: Callable[[Connection, Any], None], on_lost: Callable[[Connection], None], *,
        connects: bool,
    ) -> None:  # fmt: skip
        self._secret, self._connects = secret, connects
        self._on_message, self._on_lost = on_message, on_lost
        self._unread = bytearray()
        self._is_known = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._connects:
            self._transport.write(self._secret)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        start = 0
        if not self._is_known:
            start = len(self._secret)
            if len(self._unread) < start:
                return
            if not hmac.compare_digest(bytes(self._unread[:start]), self._secret):
                self.abort()
                return
            self._is_known = True
            if not self._connects and self._transport is not None:
                self._transport.write(self._secret)
        while len(self._unread) - start >= _SIZE.size:
            end = start + _SIZE.size + _SIZE.unpack_from(self._unread, start)[0]
            if end > len(self._unread):
                break
            with memoryview(self._unread)[start + _SIZE.size : end] as frame:
                message = unpacked(frame)
            start = end
            self._on_message(self, message)
        del self._unread[:start]

    def send(self, message: object) -> None:
        assert self._transport is not None, "it is connected"
        data = packed(message)
        self._transport.write(_SIZE.pack(len(data)) + data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close after everything sent has been written."""
        if self._transport is not None:
            self._transport.close()
