"""Bodies: of requests, read and decoded, with the fields of them that did nothing; and JSON as an answer.

A large body is decoded off the loop, after a look at how many values it has: decoding is one call that no thread can interrupt."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from orjson import dumps
from starlette.requests import Request
from starlette.responses import Response

from server.config.server_config import ServerConfig
from server.context.arrival import CURRENT_ID
from server.context.offload import Offload
from server.http import admission
from server.http.json_values import has_more_values
from server.wire.errors import TooManyValues, UnsupportedParameter, clip
from server.wire.schema import T, Wire

logger = logging.getLogger("oneloop.http")

MAX_VALUES = 1 << 20  # of a body, where a name counts 16; token ids are the most that anybody sends
UNCOUNTED_BYTES = 1 << 18  # a body of so many cannot have enough values to matter
BYTES_PER_CHAR = 8  # of a body, to decode which takes as long as to tokenise a character


def json_response(body: object, status: int = 200) -> Response:
    return Response(dumps(body), status, media_type="application/json")


async def read_request(
    request: Request, wire: Wire[T], config: ServerConfig, offload: Offload, *, from_any_program: bool = False
) -> T:
    """The decoded body. Fields nobody knows are noted as ignored, or refused by a server that is strict about them.
    `from_any_program`: see `admission.read_body`.

    Raises ApiError."""
    ignored: list[str] = []
    try:
        body = await admission.read_body(request, config.max_body_size, from_any_program=from_any_program)
        request.scope["body_cost"] = cost = len(body) // BYTES_PER_CHAR
        found = await offload.run(cost, lambda: _decoded(wire, body, None if config.strict_fields else ignored))
    finally:
        admission.release_body(request)
    named: str | None = getattr(found, "request_id", None)  # of APIs whose bodies have it
    if named and "x-request-id" not in request.headers:
        request.scope["request_id"] = named
        CURRENT_ID.set(named)
    if ignored:
        note_ignored(request, ignored, config)
    return found


def _decoded(wire: Wire[T], body: bytes, ignored: list[str] | None) -> T:
    if len(body) > UNCOUNTED_BYTES and has_more_values(body, MAX_VALUES):
        raise TooManyValues(MAX_VALUES)
    return wire.decode(body, ignored)


def body_cost(request: Request) -> int:
    """What it costs to go through what a request's body holds, in characters of tokenising (`offload`)."""
    found: int = request.scope["body_cost"]
    return found


def note_ignored(request: Request, names: Sequence[str], config: ServerConfig) -> None:
    """Fields that changed nothing are named to the client (`middleware` sends the header) and, the first time, in the log.

    Raises UnsupportedParameter where the server is strict about them."""
    if not names:
        return
    if config.strict_fields:
        raise UnsupportedParameter(names[0])
    request.scope["ignored_fields"] = [*request.scope.get("ignored_fields", ()), *names]
    if request.scope["noted_once"].is_new(names):
        logger.warning(
            "%s: ignored fields: %s (said once; X-Ignored-Fields says it to each client)",
            request.scope["request_id"],
            clip(", ".join(names)),
        )
