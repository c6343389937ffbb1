"""Outlet: path of a response to the transport of its connection. The head is sent together with the first data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

if TYPE_CHECKING:
    from server.http.protocol import HttpProtocol

MAX_JOINED_BYTES = 1 << 16  # of a body, copied behind its head


class Outlet:
    """Transport of a response. The head is sent together with the data written in the same loop iteration. Most responses
    therefore need one system call and one packet. `close` leaves the client time to read."""

    __slots__ = ("_connection", "_head", "write")

    def __init__(self, connection: HttpProtocol) -> None:
        self._connection = connection
        self._head = b""
        self.write: Callable[[bytes], None] = self._begin

    def begin(self) -> None:
        """Reset the state before the next response."""
        self.write = self._begin

    def _begin(self, data: bytes) -> None:
        if not self._connection.cycle.response_started:  # the client is told to go on with its body
            self._connection.transport.write(data)
            return
        self._head, self.write = data, self._join
        self._connection.loop.call_soon(self.flush)

    def _join(self, data: bytes) -> None:
        if len(data) <= MAX_JOINED_BYTES:
            self._head += data
            self.flush()
        else:
            self.flush()
            self.write(data)

    def flush(self) -> None:
        if self._head:
            head, self._head, self.write = self._head, b"", self._connection.transport.write
            if not self._connection.transport.is_closing():
                self.write(head)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.finish()


class BodyWriter:
    """Callable that writes the next part of a started response directly to the connection, without ASGI `send`. It returns False
    without writing if the write would block or the response is not chunked."""

    __slots__ = ("_cycle", "_flow", "_outlet")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl, outlet: Outlet) -> None:
        self._cycle = cycle
        self._flow = flow
        self._outlet = outlet  # whose head may still be there

    def __call__(self, body: bytes) -> bool:
        write = self.chunk_writer
        if write is None:
            return False
        write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    @property
    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """Function that writes an already framed chunk; None if a write would block or the response is not chunked."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return None
        return self._outlet.write
