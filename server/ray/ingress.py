"""Ingress: receives requests from Serve's proxies, forwards each to a replica, and answers with an error if the replica ends.

The application's own middleware runs first (`process.app.guarded`), so keys and body limits are checked before a request is
forwarded. Requests that concern all replicas are sent to all. Ray is accessed only through a `Fleet`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from orjson import JSONDecodeError, dumps, loads
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.routes import ROUTES
from server.config.server_config import ServerConfig
from server.http.auth import OPERATOR_PATHS
from server.http.body import read_bytes
from server.http.call import call_in
from server.http.errors import ApiError, ClientLeft, Conflict, ReplicaLost, Unavailable, as_api_error
from server.http.metrics import HttpStats
from server.http.watch import ClientWatch
from server.process.app import guarded
from server.ray.exchange import Forwarded, Headers, Piece, ReplicaAnswer, ResponseHead
from server.ray.expositions import joined
from server.ray.last_words import last_words
from server.ray.prefixes import prefixes_of

logger = logging.getLogger("oneloop.ray")

ACCEPT_LIMIT_S = 60.0  # for a replica to take a request, where --max-queue-time says nothing: one may have to start
RETRY_AFTER_S = 5
METRICS, DRAIN = "/metrics", "/drain"
# What the layers in front of us say of each answer themselves.
_OURS = frozenset({b"x-request-id", b"request-id", b"date", b"transfer-encoding", b"connection"})
_PATHS = frozenset(each.path for each in ROUTES)


class Stream(Protocol):
    """Response in flight. Leaving the context ends the request. The iteration raises ReplicaLost or another ApiError."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Piece: ...


class Fleet(Protocol):
    """Interface of the ingress to all replicas."""

    async def answer(self, request: Forwarded) -> Stream:
        """Forward `request` to a replica chosen by the fleet. Return the response stream, which must be entered to read it."""
        ...

    async def answer_all(self, request: Forwarded) -> Sequence[ReplicaAnswer]:
        """Send `request` to all running replicas. Return their answers. Raises ApiError."""
        ...


class Ingress:
    def __init__(self, config: ServerConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, call = scope["path"], call_in(scope)
        if path in _PATHS:
            call.route = path
        if path == DRAIN:
            raise Conflict("Ray Serve manages the replicas: `serve shutdown`, or ending `oneloop ray`, drains them")
        body = await read_bytes(Request(scope, receive), self._config.max_body_size)
        if path == METRICS or (path in OPERATOR_PATHS and scope["method"] == "POST"):
            request = Forwarded.of(scope, body).without(b"accept")  # of formats, the one that can be put together
            await self._answer_all(request, scope, send)
            return
        owner = b"" if self._config.shared_prefix_cache else (call.tenant or "").encode()
        request = Forwarded.of(scope, body, prefixes_of(body, owner))
        async with ClientWatch(receive) as watch, await self._fleet.answer(request) as stream:
            await self._relay(stream, scope, send)
        if watch.gone:
            raise ClientLeft

    async def _relay(self, stream: Stream, scope: Scope, send: Send) -> None:
        limit_s = self._config.max_queue_time or ACCEPT_LIMIT_S
        try:
            async with asyncio.timeout(limit_s):
                await anext(stream)
        except TimeoutError:
            raise Unavailable(
                f"No replica accepted the request within {limit_s:g} s", retry_after_s=RETRY_AFTER_S
            ) from None
        head: ResponseHead | None = None
        last = b""
        try:
            async for piece in stream:
                if isinstance(piece, ResponseHead):
                    head = piece
                    await send(_start(head, scope))
                elif piece is not None:
                    last = piece
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            if head is None:
                raise
            call = call_in(scope)
            answer = as_api_error(error, call.id)
            words = last_words(answer, scope["path"], call.error_shape, head.headers, last, call.id)
            if words is None:
                raise
            _log_loss(answer, scope)
            await send({"type": "http.response.body", "body": words, "more_body": False})
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer_all(self, request: Forwarded, scope: Scope, send: Send) -> None:
        answers = await self._fleet.answer_all(request)
        if not answers:
            raise Unavailable("No replica is available", retry_after_s=RETRY_AFTER_S)
        head, body = together(answers, is_metrics=scope["path"] == METRICS)
        await send(_start(head, scope))
        await send({"type": "http.response.body", "body": body, "more_body": False})


def ingress_app(config: ServerConfig, fleet: Fleet) -> ASGIApp:
    return guarded(Ingress(config, fleet), config, HttpStats())


def together(answers: Sequence[ReplicaAnswer], *, is_metrics: bool) -> tuple[ResponseHead, bytes]:
    """Combine the answers of all replicas. The result is the first error if there is one. Otherwise it is a joined metrics page,
    or a JSON object in which numbers are added."""
    first = next((each for each in answers if each.status >= 400), answers[0])
    if first.status >= 400:
        return ResponseHead(first.status, _without_length(first.headers)), first.body
    if is_metrics:
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        return ResponseHead(200, [kind]), joined({each.replica: each.body for each in answers})
    return ResponseHead(first.status, _without_length(first.headers)), _added([each.body for each in answers])


def _added(bodies: Sequence[bytes]) -> bytes:
    try:
        objects = [loads(body) for body in bodies]
    except JSONDecodeError:
        return bodies[0]
    if not all(isinstance(each, dict) for each in objects):
        return bodies[0]
    numbers = {name for name, value in objects[0].items() if type(value) is int}
    return dumps({**objects[0], **{name: sum(each.get(name, 0) for each in objects) for name in numbers}})


def _without_length(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name.lower() != b"content-length"]


def _start(head: ResponseHead, scope: Scope) -> Message:
    """Return the ASGI message that starts the response. The request gets the replica's request id."""
    for name, value in head.headers:
        if name.lower() == b"x-request-id":
            call_in(scope).id = value.decode("latin-1")
    headers = [(name, value) for name, value in head.headers if name.lower() not in _OURS]
    return {"type": "http.response.start", "status": head.status, "headers": headers}


def _log_loss(error: ApiError, scope: Scope) -> None:
    if isinstance(error, ReplicaLost):
        logger.warning("%s: its replica ended before the answer was complete", call_in(scope).id)
