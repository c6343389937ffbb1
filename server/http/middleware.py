"""Outermost middleware: request id, access log, statistics, and conversion of errors to responses.

Plain ASGI: one object per request and one call per message. A BaseHTTPMiddleware costs more than the rest of the HTTP layer."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.api import AdapterGone, Busy, ContextTooLong, EngineError, EngineStopped
from server.http.call import Call, call_in
from server.http.errors import (
    ApiError,
    ClientLeft,
    ContextLengthExceeded,
    ErrorShape,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    TooManyRequests,
    Unavailable,
    clip,
)
from server.http.metrics import HttpStats
from server.http.websocket import as_request

logger = logging.getLogger("oneloop.http")
access_logger = logging.getLogger("oneloop.access")

_NO_NAME = re.compile(r"[^\w.-]", re.ASCII)
RETRY_WHEN_STOPPED_S = 10
MAX_SETS = 1000  # of names that clients choose; beyond that it begins anew
QUIET_ROUTES = frozenset({"/health", "/health/live", "/health/ready", "/health/generate", "/metrics"})
STATUS_CLIENT_LEFT = 499  # nothing is sent under it; it says in log and metrics that the client did not wait


class Clock:
    """Source of the Date header's value, which is rendered at most once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._text = b""

    def date(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, email.utils.formatdate(second, usegmt=True).encode("ascii")
        return self._text


class NotedOnce:
    """Sets of ignored field names that have been logged. Requests that ignore the same names are logged once."""

    def __init__(self, max_sets: int = MAX_SETS) -> None:
        self._max_sets = max_sets
        self._seen: set[frozenset[str]] = set()

    def is_new(self, names: Iterable[str]) -> bool:
        """Return True if this set of names has not been passed before, and remember the set."""
        found = frozenset(names)
        if found in self._seen:
            return False
        if len(self._seen) >= self._max_sets:
            self._seen.clear()
        self._seen.add(found)
        return True


class _Exchange:
    """State of one request and of its response's start."""

    __slots__ = ("_call", "_date", "_noted", "_send", "status")

    def __init__(self, call: Call, send: Send, date: bytes, noted: NotedOnce) -> None:
        self.status = 0
        self._call = call
        self._send = send
        self._date = date
        self._noted = noted

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            call = self._call
            self.status = message["status"]
            own = [(b"x-request-id", call.id.encode("latin-1")), (b"date", self._date)]
            if call.error_shape is not None:
                own += call.error_shape.headers(call.id)
            if call.ignored:
                own.append((b"x-ignored-fields", _as_header(call.ignored)))
                self._log(call.ignored)
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await self._send(message)

    def _log(self, ignored: list[str]) -> None:
        if self._noted.is_new(ignored):
            names = clip(", ".join(ignored))
            logger.warning(
                "%s: ignored fields: %s (logged once; X-Ignored-Fields reports it to each client)", self._call.id, names
            )


def _as_header(names: list[str]) -> bytes:
    """Return client field names as a header value, with limited length and harmless characters only."""
    return ", ".join(_NO_NAME.sub("?", name)[:64] for name in names[:20]).encode("ascii")


class RequestMiddleware:
    """Outermost layer of the application. `error_shapes`: error formats by path prefix. They apply to early refusals too."""

    def __init__(
        self,
        app: ASGIApp,
        stats: HttpStats,
        access_log: bool,
        error_shapes: Mapping[str, ErrorShape] = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._error_shapes = tuple(error_shapes.items())
        self._stats = stats
        self._access_log = access_log
        self._clock = Clock()
        self._noted = NotedOnce()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            scope, receive, send = await as_request(scope, receive, send)
        elif scope["type"] != "http":
            return  # a lifespan: there is nothing to start here
        scope["app"] = self  # Starlette's Router then raises what it would answer
        call = call_in(scope)
        call.begin(scope)
        call.error_shape = self._error_shape(scope["path"])
        call.receive, call.send_body = receive, call.send_body or send
        exchange = _Exchange(call, send, self._clock.date(), self._noted)
        self._stats.in_flight += 1
        try:
            await self._app(scope, receive, exchange.send)
        except (ClientLeft, ClientDisconnect):
            exchange.status = STATUS_CLIENT_LEFT
        except asyncio.CancelledError:
            # Only the end of the server does this to the outermost coroutine; uvicorn would swallow it as well, with a
            # traceback.
            logger.warning("%s: response cut off because the server is closing", call.id)
        except Exception as error:
            if exchange.status:
                raise  # half an answer is out: the connection has to be cut
            await send_error(_answer_to(error, scope, call.id), call, exchange.send)
        finally:
            self._stats.in_flight -= 1
            self._note(scope, call, exchange.status)
            call.end()

    def _error_shape(self, path: str) -> ErrorShape | None:
        for prefix, shape in self._error_shapes:
            if path.startswith(prefix) and path[len(prefix) :][:1] in ("", "/"):
                return shape
        return None

    def _note(self, scope: Scope, call: Call, status: int) -> None:
        elapsed_s = time.monotonic() - call.arrival_s
        self._stats.observe(call.route, scope["method"], status, elapsed_s)
        if self._access_log:
            host, port = scope.get("client") or ("-", 0)
            # Routes that are polled every few seconds would drown the others.
            level = logging.DEBUG if call.route in QUIET_ROUTES and status in (200, 503) else logging.INFO
            access_logger.log(
                level, '%s:%d "%s %s" %d %.1f ms %s',
                host, port, scope["method"], _printable(scope), status, elapsed_s * 1000, call.id,
            )  # fmt: skip


def _answer_to(error: Exception, scope: Scope, id: str) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return refusal_of(error)
    if isinstance(error, HTTPException) and error.status_code == 404:
        return RouteNotFound(scope["method"], scope["path"])
    if isinstance(error, HTTPException) and error.status_code == 405:
        if scope.get("path_params"):  # the name of a route there is not, taken for an id
            return RouteNotFound(scope["method"], scope["path"])
        return MethodNotAllowed(scope["method"], scope["path"], (error.headers or {}).get("Allow", ""))
    logger.error("%s: %s %s failed", id, scope["method"], _printable(scope), exc_info=error)
    return InternalError(id)


def refusal_of(error: EngineError) -> ApiError:
    """Return the ApiError that reports an engine error to the client."""
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


def _printable(scope: Scope) -> str:
    """Return the path of a request for the log, with unprintable bytes escaped and limited length."""
    return clip(scope["path"]).encode("unicode_escape").decode("ascii")


async def send_error(error: ApiError, call: Call, send: Send) -> None:
    body = error.body() if call.error_shape is None else call.error_shape.body(error, call.id)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
