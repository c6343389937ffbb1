"""Declaration of HTTP operations at their handlers: method, path, and description for the OpenAPI document.

    @route("GET", "/version", "version", "Server", "The server's version", {JSON: Version})
    async def version(service: Service, http: Request) -> Response: ...

`app` finds every Route and every ErrorsBelow in the files of `api/`; there is no other list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.service import Service
from server.http.errors import ErrorShape

P = ParamSpec("P")
Handler = Callable[[Service, Request], Awaitable[ASGIApp]]

JSON, EVENTS, HTML, TEXT = "application/json", "text/event-stream", "text/html", "text/plain"
FORM = "multipart/form-data"
BODY_REFUSALS = (400, 404, 413, 415, 503)  # of what reads a body and needs the model
GENERATION_REFUSALS = (*BODY_REFUSALS, 429, 504)


class ErrorDetails(Struct):
    message: str
    type: str
    param: str | None  # the field at fault
    code: str | None


class ErrorBody(Struct):
    """Error body in OpenAI's format."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """HTTP operation: its handler, method and path, and its description for the OpenAPI document.

    `path`: in Starlette's form, `{name}`, or `{name:path}` if the parameter may contain slashes. `answers`: type of a successful
    response by media type, None for plain text. `refusals`: error statuses besides those of every route; their body has the type
    `error`. `query`: type of the query parameters. `parameters`: descriptions of path parameters. `request_media`: media type of
    the body. `may_be_bodiless`: the body may be missing. `is_socket`: the operation opens a WebSocket."""

    handler: Handler
    method: str
    path: str
    id: str
    tag: str
    summary: str
    answers: Mapping[str, Any]
    request: Any = None
    refusals: tuple[int, ...] = ()
    error: Any = ErrorBody
    query: Any = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    request_media: str = JSON
    may_be_bodiless: bool = False
    is_socket: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ErrorsBelow:
    """Error format of `path` and all paths below it, for APIs whose clients do not support OpenAI's error format."""

    path: str
    shape: ErrorShape


def _decorator(make: Callable[Concatenate[Handler, P], Route]) -> Callable[P, Callable[[Handler], Route]]:
    def described(*args: P.args, **kwargs: P.kwargs) -> Callable[[Handler], Route]:
        return lambda handler: make(handler, *args, **kwargs)

    return described


route = _decorator(Route)  # of the handler below it, by the fields that follow `handler`
