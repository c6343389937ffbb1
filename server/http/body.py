"""Bodies: of requests, read and decoded, with the fields of them that did nothing; and JSON as an answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from orjson import dumps
from starlette.requests import Request
from starlette.responses import Response

from server.config import ServerConfig
from server.errors import UnsupportedParameter, clip
from server.http import admission
from server.schema import T, Wire

logger = logging.getLogger("oneloop.http")


def json_response(body: object, status: int = 200) -> Response:
    return Response(dumps(body), status, media_type="application/json")


async def read_request(request: Request, wire: Wire[T], config: ServerConfig) -> T:
    """The decoded body. Fields nobody knows are noted as ignored, or refused by a server that is strict about them.

    Raises ApiError."""
    ignored: list[str] = []
    body = await admission.read_body(request, config.max_body_size)
    found = wire.decode(body, None if config.strict_fields else ignored)
    named: str | None = getattr(found, "request_id", None)  # of APIs whose bodies have it
    if named and "x-request-id" not in request.headers:
        request.scope["request_id"] = named
    if ignored:
        note_ignored(request, ignored, config)
    return found


def note_ignored(request: Request, names: Sequence[str], config: ServerConfig) -> None:
    """Fields that changed nothing are named to the client (`middleware` sends the header) and in the log.

    Raises UnsupportedParameter where the server is strict about them."""
    if not names:
        return
    if config.strict_fields:
        raise UnsupportedParameter(names[0])
    request.scope["ignored_fields"] = [*request.scope.get("ignored_fields", ()), *names]
    logger.warning("%s: ignored fields: %s", request.scope["request_id"], clip(", ".join(names)))
