"""Bodies: of requests, read and decoded; and JSON as an answer.

A large body is put together and decoded off the loop, after a look at how many values it has, and how long names are: decoding is
one call that no thread can interrupt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.json import encode
from starlette.requests import Request
from starlette.responses import Response

from server.config.server_config import ServerConfig
from server.http.admission import check_head
from server.http.arrival import CURRENT_ID
from server.http.errors import BodyTooLarge, NameTooLong, TooManyValues
from server.http.heap import touch_heap
from server.http.json_values import Excess, excess
from server.http.long_json import let_go, written
from server.http.noted import IGNORED_FIELDS
from server.http.offload import Offload
from server.http.protocol import INCOMING_BODY, IncomingBody
from server.http.schema import T, Wire

R = TypeVar("R")

MAX_VALUES = 1 << 20  # of a body, where a name counts 16; token ids are the most that anybody sends
MAX_NAME_BYTES = 1 << 16
UNCOUNTED_BYTES = 1 << 18  # a body of so many cannot have enough values to matter
BYTES_PER_CHAR = 8  # of a body, to decode which takes as long as to tokenise a character


def json_response(body: object, status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")


def long_json_response(body: object) -> Response:
    """The same for a thread and a `body` that nobody reads afterwards: whatever its size, others go on meanwhile."""
    content = written(body)
    let_go(body)
    return Response(content, media_type="application/json")


async def read_chunks(request: Request, limit_bytes: int, *, from_any_program: bool = False) -> list[bytes]:
    """The JSON body as it came; see `check_head`, which is asked first.

    Raises BodyTooLarge before the excess is read, and what the connection says of a body that does not come to its end."""
    check_head(request, limit_bytes, from_any_program=from_any_program)
    return await _chunks(request, limit_bytes)


async def _chunks(request: Request, limit_bytes: int) -> list[bytes]:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        chunks.append(chunk)
    incoming: IncomingBody | None = request.scope.get(INCOMING_BODY)
    if incoming is not None and incoming.has_failed:
        incoming.check()
    return chunks


async def read_bytes(request: Request, limit_bytes: int) -> bytes:
    """The body as it came, of whatever type, for somebody else to look at. Raises BodyTooLarge, ClientDisconnect."""
    return b"".join(await _chunks(request, limit_bytes))


def joined(chunks: list[bytes]) -> bytes:
    """The body of `chunks`, of which nothing is left. Whatever its size, what is done here takes others no time beside a thread.

    Raises TooManyValues or NameTooLong for one that would take them much of it to decode."""
    touch_heap(2 * sum(map(len, chunks)))  # the body, and what is decoded
    body = b"".join(chunks)
    chunks.clear()
    found = excess(body, MAX_VALUES, MAX_NAME_BYTES) if len(body) > UNCOUNTED_BYTES else None
    if found is Excess.VALUES:
        raise TooManyValues(MAX_VALUES)
    if found is Excess.NAME:
        raise NameTooLong(MAX_NAME_BYTES)
    return body


async def read_as(
    request: Request,
    wire: Wire[T],
    make: Callable[[T], R],
    config: ServerConfig,
    offload: Offload,
    *,
    from_any_program: bool = False,
) -> tuple[T, R]:
    """The decoded body, and what `make` makes of it: one trip off the loop. Fields nobody knows are noted as ignored, or refused by
    a server that is strict about them.

    Raises ApiError."""
    ignored: list[str] = []
    incoming: IncomingBody | None = request.scope.get(INCOMING_BODY)
    try:
        chunks = await read_chunks(request, config.max_body_size, from_any_program=from_any_program)
        request.scope["body_cost"] = cost = sum(map(len, chunks)) // BYTES_PER_CHAR

        def made() -> tuple[T, R]:
            body = joined(chunks)
            given = wire.decode(body, None if config.strict_fields else ignored)
            return given, make(given)

        found = await offload.run(cost, made)
    finally:
        if incoming is not None:
            incoming.release()
    named: str | None = getattr(found[0], "request_id", None)  # of APIs whose bodies have it
    if named and "x-request-id" not in request.headers:
        request.scope["request_id"] = named
        CURRENT_ID.set(named)
    request.scope[IGNORED_FIELDS] += ignored
    return found


async def read_request(
    request: Request, wire: Wire[T], config: ServerConfig, offload: Offload, *, from_any_program: bool = False
) -> T:
    """The decoded body; see `read_as`."""
    given, _ = await read_as(request, wire, lambda given: None, config, offload, from_any_program=from_any_program)
    return given


def body_cost(request: Request) -> int:
    """What it costs to go through what a request's body holds, in characters of tokenising (`offload`)."""
    found: int = request.scope["body_cost"]
    return found
