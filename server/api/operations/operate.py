"""Routes for operators: POST /reset_prefix_cache, /abort_requests and /drain, GET and POST /log_level.

`server/http/auth.py` checks who may call these routes."""

from __future__ import annotations

from typing import Literal, cast

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from server.api.route import BODY_REFUSALS, JSON, route
from server.api.service import Service
from server.http import logs
from server.http.answers import json_response
from server.http.body import read_request
from server.http.errors import InvalidRequest, WrongContentType
from server.http.schema import RequestId, Wire

BODILESS = (403, 415, 503)


def check_origin(http: Request) -> None:
    """Reject requests from web pages of other origins: browsers send this server's media type only after a preflight request.

    Raises WrongContentType if the request has an Origin header and another media type."""
    if "origin" in http.headers:
        given = http.headers.get("content-type")
        if (given or "").partition(";")[0].strip().lower() != JSON:
            raise WrongContentType(given)


class Done(Struct):
    success: bool


@route(
    "POST", "/reset_prefix_cache", "resetPrefixCache", "Operate", "Forget what prompts have left for others to share",
    {JSON: Done}, refusals=BODILESS,
)  # fmt: skip
async def reset_prefix_cache(service: Service, http: Request) -> Response:
    check_origin(http)
    for engine in service.lifecycle.require_model().engines:
        engine.reset_prefix_cache()
    return json_response(Done(success=True))


class AbortRequests(Struct, kw_only=True):
    """Body of a request to abort. Either `request_ids` (ids from X-Request-Id, the log or responses) or `abort_all`."""

    request_ids: list[RequestId] | None = None
    abort_all: bool | None = None

    def check(self) -> None:
        if bool(self.abort_all) == (self.request_ids is not None):
            raise InvalidRequest("give request_ids, or abort_all: true", param="request_ids")


class Aborted(Struct):
    """Response to an abort, with the number of sequences that were aborted."""

    aborted: int


ABORT = Wire(AbortRequests, {})


@route(
    "POST", "/abort_requests", "abortRequests", "Operate",
    "End requests: their clients get 503, or finish_reason abort in a stream", {JSON: Aborted}, AbortRequests,
    (*BODY_REFUSALS, 403),
)  # fmt: skip
async def abort_requests(service: Service, http: Request) -> Response:
    serving = service.lifecycle.require_model().engines
    given = await read_request(http, ABORT, service.config)
    ids = None if given.request_ids is None else frozenset(given.request_ids)
    return json_response(Aborted(sum(engine.abort(ids) for engine in serving)))


class Draining(Struct):
    status: Literal["draining"]
    running: int
    waiting: int


@route(
    "POST", "/drain", "drain", "Operate",
    "Take no more requests, finish those in flight, end the process: as SIGTERM does", {JSON: Draining},
    refusals=BODILESS,
)  # fmt: skip
async def drain(service: Service, http: Request) -> Response:
    check_origin(http)
    health = service.lifecycle.require_model().engines.health()
    service.lifecycle.stopping.set()
    return json_response(Draining("draining", health.num_running, health.num_waiting))


Level = Literal["debug", "info", "warning", "error"]


class LogLevel(Struct, kw_only=True):
    level: Level

    def check(self) -> None:
        """Do nothing, because the field type checks the value."""


LEVEL = Wire(LogLevel, {})


@route("GET", "/log_level", "logLevel", "Operate", "The least severe message shown", {JSON: LogLevel})
async def log_level(service: Service, http: Request) -> Response:
    return json_response(LogLevel(level=cast("Level", logs.level())))


@route(
    "POST", "/log_level", "setLogLevel", "Operate", "Show other messages from now on", {JSON: LogLevel}, LogLevel,
    (400, 403, 413, 415),
)  # fmt: skip
async def set_log_level(service: Service, http: Request) -> Response:
    given = await read_request(http, LEVEL, service.config)
    logs.set_level(given.level)
    return json_response(given)
