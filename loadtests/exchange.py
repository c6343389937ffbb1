"""One HTTP POST and its raw response, with the arrival time of each piece.

Nothing is parsed while a load runs. The client shares cores with the server, and 256 streams at 30,000 tokens a second leave the
client a few microseconds per token. `answers.py` parses the recordings afterwards. Each request has its own connection and
requests that the server closes it, so the end of the connection is the end of the response."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from loadtests.address import Address, tls_context
from loadtests.clock import Clock


@dataclass(slots=True)
class Recording:
    """Recorded response. `times[i]`: arrival time of `pieces[i]` in seconds. `failure`: reason why it failed, or None."""

    sent_s: float
    # Two flat lists of atoms: the garbage collector has nothing to walk in the middle of a measurement.
    times: list[float] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    failure: str | None = None


class _Exchange(asyncio.Protocol):
    def __init__(self, request: bytes, recording: Recording, clock: Clock) -> None:
        self._request = request
        self._now = clock.now
        self._times, self._pieces = recording.times, recording.pieces
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._times.append(self._now())
        self._pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(exc)


def post_request(address: Address, path: str, body: bytes) -> bytes:
    """Return the bytes of an HTTP request that POSTs JSON to `path` below the address."""
    more = "".join(f"{name}: {value}\r\n" for name, value in address.headers.items())
    head = (
        f"POST {address.path}{path} HTTP/1.1\r\nHost: {address.authority}\r\nContent-Type: application/json\r\n{more}"
        f"Accept: text/event-stream, application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def exchange(
    address: Address, request: bytes, timeout_s: float, clock: Clock, recording: Recording | None = None
) -> Recording:
    """Send a request and record the response until the server closes. Failures are recorded, not raised. Cancellation drops the
    connection. `recording`: object to fill, which the caller can read meanwhile."""
    recording = Recording(clock.now()) if recording is None else recording
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, protocol = await _connect(address, _Exchange(request, recording, clock))
            error = await protocol.closed
        if error is not None:
            recording.failure = f"{type(error).__name__}: {error}"
    except TimeoutError:
        recording.failure = f"no end within {timeout_s:g} s"
    except OSError as error:
        recording.failure = f"{type(error).__name__}: {error}"
    finally:
        if transport is not None:
            transport.abort()
    return recording


async def _connect(address: Address, protocol: _Exchange) -> tuple[asyncio.Transport, _Exchange]:
    loop = asyncio.get_running_loop()
    if address.uds is not None:
        transport, _ = await loop.create_unix_connection(lambda: protocol, address.uds)
    elif address.tls:
        transport, _ = await loop.create_connection(
            lambda: protocol, address.host, address.port, ssl=tls_context(), server_hostname=address.name
        )
    else:
        transport, _ = await loop.create_connection(lambda: protocol, address.host, address.port)
    return transport, protocol
