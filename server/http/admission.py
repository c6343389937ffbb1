"""Admission: what is checked of a request before its body is read, and how the engine's refusals reach the client.

Checks come in the order of their price: the server is ready, the content type, the size of the body, then (elsewhere) the
model's name, the length of a text before it is tokenised, the number of sequences, and the context length."""

from __future__ import annotations

from starlette.requests import Request

from runtime.api import ContextTooLong, EngineError, EngineStopped, QueueFull
from server.errors import (
    ApiError,
    BodyTooLarge,
    ContextLengthExceeded,
    InternalError,
    TooManyRequests,
    Unavailable,
    WrongContentType,
)

RETRY_WHEN_FULL_S = 1
RETRY_WHEN_STOPPED_S = 10


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The JSON body. Raises WrongContentType or BodyTooLarge, the latter before the excess is read."""
    given = request.headers.get("content-type")
    media_type = (given or "").partition(";")[0].strip().lower()
    # Only this type makes a browser ask first, so a page of somebody else's cannot use a server on this machine.
    if media_type != "application/json":
        raise WrongContentType(given)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def refusal_of(error: EngineError) -> ApiError:
    """The answer to a client whose request `submit` refuses."""
    match error:
        case ContextTooLong():
            return ContextLengthExceeded(f"This model's context is too short: {error}")
        case QueueFull():
            return TooManyRequests(f"The server is busy: {error}", retry_after_s=RETRY_WHEN_FULL_S)
        case EngineStopped():
            return Unavailable(
                "The server is shutting down or its engine has failed", retry_after_s=RETRY_WHEN_STOPPED_S
            )
        case _:
            return InternalError("the engine")
