"""Admission: what is checked of a request before its body is read, and how the engine's refusals reach the client.

Checks come in the order of their price: the server is ready, the content type, the size of the body, then (elsewhere) the
model's name, the length of a text before it is tokenised, the number of sequences, and the context length."""

from __future__ import annotations

import math

from starlette.requests import Request

from runtime.api import AdapterGone, Busy, ContextTooLong, EngineError, EngineStopped
from server.http.errors import (
    ApiError,
    BodyTooLarge,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    TooManyRequests,
    Unavailable,
    WrongContentType,
)

RETRY_WHEN_STOPPED_S = 10


def check_head(request: Request, limit_bytes: int, *, from_any_program: bool = False) -> None:
    """What can be said before a JSON body comes. `from_any_program`: whatever its content type says, if no browser sends it: curl
    calls everything a form.

    Raises WrongContentType or BodyTooLarge."""
    given = request.headers.get("content-type")
    media_type = (given or "").partition(";")[0].strip().lower()
    # Only this type makes a browser ask first, so a page of somebody else's cannot use a server on this machine. A browser names
    # the page's origin with every POST.
    if media_type != "application/json" and not (from_any_program and "origin" not in request.headers):
        raise WrongContentType(given)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise BodyTooLarge(limit_bytes)


def refusal_of(error: EngineError) -> ApiError:
    """The answer to a client whose request `submit` refuses."""
    match error:
        case ContextTooLong():
            return ContextLengthExceeded(f"This model's context is too short: {error}")
        case Busy():
            return TooManyRequests(f"The server is busy: {error}", retry_after_s=math.ceil(error.retry_after_s))
        case AdapterGone():
            return InvalidRequest(str(error), param="model")
        case EngineStopped():
            return Unavailable(
                "The server is shutting down or its engine has failed", retry_after_s=RETRY_WHEN_STOPPED_S
            )
        case _:
            return InternalError("the engine")
