"""Transport of answers from replicas to an ingress. One TCP connection for each pair carries all requests.

In Serve's own streams, each message is a separate task result. Here, all data that one engine step produces for many streams is
one write and one read. A Mailbox listens at the ingress. Each request gives the replica the Mailbox's address and secret; the
replica sends the secret first. Independent of Ray, and of the contents of the frames."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Self, cast

import msgspec

from server.http.errors import ReplicaLost
from server.ray.exchange import ACCEPTED, Piece, ResponseHead

_FRAME = struct.Struct("<QIB")  # number of the request, bytes that follow, what they are
_SECRET_BYTES = 32


class FrameKind(IntEnum):
    ACCEPTED = 0
    HEAD = 1
    BODY = 2
    END = 3


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """Address to which a replica sends the frames of an answer."""

    host: str
    port: int
    secret: bytes
    number: int


# --- the ingress' end -------------------------------------------------------------------------------------------------


class ReplyMailbox:
    """Frames received for one request, in order. If the request has failed, the iteration raises its error."""

    def __init__(self, reply_to: ReplyTo, close: Callable[[int], None]) -> None:
        self.reply_to = reply_to
        self.line: asyncio.Transport | None = None  # by which pieces come
        self._close = close
        self._pieces: deque[Piece] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, kind: int, payload: bytes) -> None:
        """Add a frame. Body frames that arrive before they are read are joined."""
        if kind == FrameKind.BODY:
            last = self._pieces[-1] if self._pieces else None
            if isinstance(last, bytes):
                self._pieces[-1] = last + payload
            else:
                self._pieces.append(payload)
        elif kind == FrameKind.HEAD:
            status, headers = msgspec.msgpack.decode(payload, type=tuple[int, list[tuple[bytes, bytes]]])
            self._pieces.append(ResponseHead(status, headers))
        elif kind == FrameKind.ACCEPTED:
            self._pieces.append(ACCEPTED)
        else:
            self._ended = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the iteration with `error`, after the frames already received."""
        if self._error is None:
            self._error = error
            self._wake()

    def close(self) -> None:
        self._close(self.reply_to.number)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if self._ended:
                raise StopAsyncIteration
            if self._error is not None:
                self._ended, error, self._error = True, self._error, None
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._pieces.popleft()


class Mailbox:
    """Receiver of the frames of all requests. `host`: address of this machine to which replicas can connect."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._port: int | None = None
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._next = 0
        self._boxes: dict[int, ReplyMailbox] = {}

    async def open(self) -> ReplyMailbox:
        """Return a ReplyMailbox that receives the answer to one request. Close it afterwards. Raises OSError if listening fails."""
        async with self._opening:
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(lambda: _Incoming(self), self._host, 0)
                self._port = self._server.sockets[0].getsockname()[1]
        assert self._port is not None, "it listens"
        self._next += 1
        box = ReplyMailbox(ReplyTo(self._host, self._port, self._secret, self._next), self._drop)
        self._boxes[self._next] = box
        return box

    def _drop(self, number: int) -> None:
        self._boxes.pop(number, None)

    def knows(self, secret: bytes) -> bool:
        return hmac.compare_digest(secret, self._secret)

    def put(self, number: int, kind: int, payload: bytes, line: asyncio.Transport) -> None:
        """Deliver a frame to request `number`. Frames for a request that has ended are dropped."""
        box = self._boxes.get(number)
        if box is not None:
            box.line = line
            box.put(kind, payload)

    def lost(self, line: asyncio.Transport) -> None:
        """Fail all requests whose frames came over the lost connection `line`."""
        for box in self._boxes.values():
            if box.line is line:
                box.fail(ReplicaLost())

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()


class _Incoming(asyncio.Protocol):
    """Connection from a replica, at the ingress."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._unread = bytearray()
        self._is_known = False
        self._line: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._line = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        assert self._line is not None, "it is connected"
        self._unread += data
        start = 0
        if not self._is_known:
            if len(self._unread) < _SECRET_BYTES:
                return
            if not self._mailbox.knows(bytes(self._unread[:_SECRET_BYTES])):
                self._line.abort()
                return
            self._is_known, start = True, _SECRET_BYTES
        while len(self._unread) - start >= _FRAME.size:
            number, size, kind = _FRAME.unpack_from(self._unread, start)
            end = start + _FRAME.size + size
            if end > len(self._unread):
                break
            self._mailbox.put(number, kind, bytes(self._unread[start + _FRAME.size : end]), self._line)
            start = end
        del self._unread[:start]

    def connection_lost(self, error: Exception | None) -> None:
        if self._line is not None:
            self._mailbox.lost(self._line)


_WATCHING: set[asyncio.Task[None]] = set()  # a call may end a little later than its answer


class Delivery:
    """Answer that arrives in `box`, a `Stream`. `work`: the call of the replica, which ends when everything is sent. If it
    raises, its exception, converted by `as_ours`, also ends the answer. `cancel`: cancels the call."""

    def __init__(
        self,
        box: ReplyMailbox,
        work: Awaitable[object],
        cancel: Callable[[], object],
        as_ours: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self._box = box
        self._work = work
        self._cancel = cancel
        self._as_ours = as_ours
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch(), name="delivery")
        _WATCHING.add(self._watching)
        self._watching.add_done_callback(_WATCHING.discard)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._box.close()
        if kind is not None and self._watching is not None and not self._watching.done():
            self._cancel()

    async def _watch(self) -> None:
        try:
            await self._work
        except Exception as error:
            self._box.fail(self._as_ours(error))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        return await anext(self._box)


# --- the replica's end ------------------------------------------------------------------------------------------------


class MailboxConnection(asyncio.Protocol):
    """Connection of a replica to a Mailbox. Data sent in one iteration of the event loop is sent by one write."""

    def __init__(self, secret: bytes) -> None:
        self._unsent: list[bytes] = [secret]
        self._transport: asyncio.Transport | None = None
        self._is_due = False
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True

    def send(self, number: int, piece: Piece) -> None:
        if isinstance(piece, bytes):
            self._put(number, FrameKind.BODY, piece)
        elif isinstance(piece, ResponseHead):
            headers = [(bytes(name), bytes(value)) for name, value in piece.headers]
            self._put(number, FrameKind.HEAD, msgspec.msgpack.encode((piece.status, headers)))
        else:
            self._put(number, FrameKind.ACCEPTED, b"")

    def end(self, number: int) -> None:
        self._put(number, FrameKind.END, b"")

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _put(self, number: int, kind: FrameKind, payload: bytes) -> None:
        self._unsent.append(_FRAME.pack(number, len(payload), kind))
        self._unsent.append(payload)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        if self._transport is not None and not self.is_lost and self._unsent:
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()


class Lines:
    """Connections of a replica, one to each Mailbox."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], MailboxConnection] = {}
        self._opening = asyncio.Lock()

    async def to(self, reply_to: ReplyTo) -> MailboxConnection:
        """Return the connection to an address, and connect if necessary. Raises OSError if no process listens there."""
        key = reply_to.host, reply_to.port
        async with self._opening:
            line = self._lines.get(key)
            if line is None or line.is_lost:
                loop = asyncio.get_running_loop()
                _, line = await loop.create_connection(lambda: MailboxConnection(reply_to.secret), *key)
                self._lines = {where: each for where, each in self._lines.items() if not each.is_lost}
                self._lines[key] = line
        return line

    def close(self) -> None:
        for each in self._lines.values():
            each.close()
