"""Call: data of one request that all layers use: id, client, deadline, trace, body, and the connection to the client.

The outermost layer creates the Call and passes it as scope["call"]; routes and the code below pass it as an argument. The log
uses a ContextVar."""

from __future__ import annotations

import ipaddress
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from server.config.server_config import ServerConfig
from server.http.errors import ApiError, ErrorShape, InvalidRequest, UnsupportedParameter
from server.http.offload import Offload, Pieces, to_the_end
from server.http.schema import MAX_TIMEOUT_S, REQUEST_ID
from server.http.watch import while_waited_for

# The id of the request in work, for the log alone; None where there is none.
CURRENT_ID: ContextVar[str | None] = ContextVar("request_id", default=None)

if TYPE_CHECKING:  # models know calls, and `--help` knows models
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

ADMINISTRATOR = "administrator"
UNIX_SOCKET = b"unix"
_REQUEST_ID = re.compile(REQUEST_ID)
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)


class ChunkWriter(Protocol):
    """Callable that writes the next part of a started response directly to the connection, without ASGI `send`. It returns False
    without writing if the write would block or the response is not chunked. `chunk_writer`: function that writes a chunk with
    its size line; None if it would block."""

    def __call__(self, body: bytes) -> bool: ...

    @property
    def chunk_writer(self) -> Callable[[bytes], None] | None: ...


class IncomingBody:
    """Body of a request while it is received. `account`: called when the number of counted bytes changes."""

    __slots__ = ("_account", "_error", "num_bytes")

    def __init__(self, account: Callable[[], None]) -> None:
        self._error: ApiError | None = None
        self.num_bytes = 0
        self._account = account

    def fail(self, error: ApiError) -> None:
        """End the body early. The next `check` raises `error`."""
        self._error, self.num_bytes = error, 0

    def check(self) -> None:
        """Raise the error that ended the body early, if any, and forget it: its traceback refers to this object."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    def release(self) -> None:
        """Subtract the body from the byte count of all connections."""
        self.num_bytes = 0
        self._account()


@dataclass(eq=False, slots=True)
class Call:
    """Data of one request. `id`: valid X-Request-Id, else the id in the body, else a new id; empty without a connection.
    `arrival_s`: arrival time by `time.monotonic()`. `address`: address of the client; "" over a Unix socket, None for a request
    of this process. `key`: digest of the user's key, None without keys. `shares_as`: overrides `caller`. `trace_headers`: W3C
    headers, if traced. `default_timeout_s`: timeout if the client sets none. `body_cost`: cost of processing the body, in
    characters of tokenising. `ignored`: names of fields without effect. `offload`: executor of long work; None runs it inline.
    `send_body`: the connection's own `send`, bypassing middleware that only needs the start of a response. `writer`: factory of
    a ChunkWriter, if the connection supports it."""

    id: str = ""
    arrival_s: float = field(default_factory=time.monotonic)
    address: str | None = None
    headers: Sequence[tuple[bytes, bytes]] = ()
    route: str = "unknown"
    error_shape: ErrorShape | None = None
    key: bytes | None = None
    is_admin: bool = False
    shares_as: bytes | None = None
    trace_headers: Sequence[tuple[str, str]] = ()
    default_timeout_s: float | None = None
    offload: Offload | None = None
    body: IncomingBody | None = None
    body_cost: int = 0
    ignored: list[str] = field(default_factory=list)
    receive: Receive | None = None
    send_body: Send | None = None
    writer: Callable[[], ChunkWriter] | None = None
    _held: dict[Hashable, Callable[[], None]] = field(default_factory=dict)

    def begin(self, scope: Scope) -> None:
        """Store the headers of `scope` in the call."""
        self.headers = scope["headers"]
        self.address = (scope["client"] or ("",))[0] if "client" in scope else None
        self.arrival_s = time.monotonic()
        given = self._header(b"x-request-id") or ""
        self.rename(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)

    def rename(self, id: str) -> None:
        """Set the request's id, in this call and in log lines."""
        self.id = id
        CURRENT_ID.set(id)

    def end(self) -> None:
        """Release what was passed to `hold` and break reference cycles. Called when the response has been sent."""
        held, self._held = self._held, {}
        for release in held.values():
            release()
        self.receive = self.send_body = self.writer = self.body = None

    def next(self, id: str) -> Call:
        """Return the Call of a request that has just been received over the WebSocket of this Call."""
        call = Call(
            id, address=self.address, headers=self.headers, route=self.route, key=self.key, is_admin=self.is_admin
        )
        call.shares_as, call.trace_headers, call.offload = self.shares_as, self.trace_headers, self.offload
        call.default_timeout_s = self.default_timeout_s
        return call

    @property
    def caller(self) -> bytes | None:
        """Identity of the client for fair sharing: its API key, or without keys its address; for IPv6 the address's /64 network.
        All clients of a Unix socket share one identity. None for a request of this process."""
        if self.shares_as is not None:
            return self.shares_as
        if self.is_admin:
            return ADMINISTRATOR.encode()
        if self.key is not None or self.address is None:
            return self.key
        return _network(self.address)

    @property
    def tenant(self) -> str | None:
        """Owner of the key, which salts cache keys; None without keys."""
        if self.is_admin:
            return ADMINISTRATOR
        return None if self.key is None else self.key.hex()

    def deadline_s(self, body_s: float | None = None) -> float | None:
        """Return the time by which the answer has to be complete, by `time.monotonic()`; None without a limit. `body_s`: timeout
        from the body, in seconds; the shorter of it and X-Request-Timeout applies. Raises InvalidRequest for a malformed header."""
        given = [each for each in (body_s, self._timeout_s()) if each is not None]
        shortest = min(given, default=self.default_timeout_s)
        return None if shortest is None else self.arrival_s + shortest

    def _timeout_s(self) -> float | None:
        text = self._header(b"x-request-timeout")
        if text is None:
            return None
        if not _SECONDS.fullmatch(text.strip()) or not 0 < float(text) <= MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"X-Request-Timeout must be a number of seconds above 0, at most {MAX_TIMEOUT_S}",
                param="X-Request-Timeout",
            )
        return float(text)

    def _header(self, wanted: bytes) -> str | None:
        return next((value.decode("latin-1") for name, value in self.headers if name == wanted), None)

    async def while_waited_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, and cancel it if the client disconnects. Raises ClientLeft."""
        if self.receive is None:
            await work
        else:
            await while_waited_for(self.receive, work)

    async def run(self, cost: int, work: Callable[[], T]) -> T:
        """Return the result of `work()`, run on a thread if `cost` is high (see `Offload`). Raises TooManyRequests."""
        return work() if self.offload is None else await self.offload.run(cost, work, self.caller)

    async def run_pieces(self, cost: int, work: Pieces[T]) -> T:
        """Return the result of `work`, run piece by piece on a thread if `cost` is high. Raises TooManyRequests."""
        return to_the_end(work) if self.offload is None else await self.offload.run_pieces(cost, work, self.caller)

    def holds(self, what: Hashable) -> bool:
        return what in self._held

    def hold(self, what: Hashable, release: Callable[[], None]) -> None:
        """Keep a reference to `what` until the response has been sent, then call `release`."""
        self._held[what] = release


def call_of(request: Request) -> Call:
    """Return the Call of a request."""
    found: Call = request.scope["call"]
    return found


def call_in(scope: Scope) -> Call:
    """Return the Call of `scope`. If no outer layer created a Call, create it."""
    if "call" not in scope:
        scope["call"] = Call()
    found: Call = scope["call"]
    return found


async def off_loop(request: Request, work: Callable[[], T]) -> T:
    """Return the result of `work()`, which uses the decoded body. It runs on a thread if the body is large. Raises
    TooManyRequests."""
    call = call_of(request)
    return await call.run(call.body_cost, work)


def note_ignored(request: Request, names: Sequence[str], config: ServerConfig) -> None:
    """Record the `names` of fields that have no effect, for a response header. Raises UnsupportedParameter with --strict-fields."""
    if names and config.strict_fields:
        raise UnsupportedParameter(names[0])
    call_of(request).ignored += names


@lru_cache(1024)  # every connection has one, few are new
def _network(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return UNIX_SOCKET
    return address.packed[:8] if address.version == 6 and address.ipv4_mapped is None else address.packed[-4:]
