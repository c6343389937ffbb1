"""Routes POST /sleep and /wake_up, GET /is_sleeping, as in vLLM: free weights and KV cache until the next request."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from runtime.api import EngineClient, SleepError, SleepLevel
from server.api.operations.operate import BODILESS, check_origin
from server.api.route import JSON, route
from server.api.service import Service
from server.http.answers import json_response
from server.http.body import read_query
from server.http.errors import Unavailable
from server.http.watch import while_waited_for
from server.models.model import Engines


class SleepQuery(Struct, kw_only=True):
    """Query parameters of /sleep. `level`: 1 keeps the weight files in the page cache, 2 does not. `mode`: wait for running
    requests, or abort them."""

    level: Annotated[int, Meta(ge=1, le=2)] = 1
    mode: Literal["abort", "wait"] = "abort"


class IsSleeping(Struct):
    is_sleeping: bool


@route(
    "POST", "/sleep", "sleep", "Operate",
    "Give weights and KV cache back, and answer then; the next request has them loaded again", {JSON: IsSleeping},
    refusals=(400, *BODILESS), query=SleepQuery,
)  # fmt: skip
async def sleep(service: Service, http: Request) -> Response:
    check_origin(http)
    asked = read_query(http, SleepQuery, service.config)
    serving = [each.engine for each in service.lifecycle.require_resident()]
    for engine in serving:
        if asked.mode == "abort":
            engine.abort()
        await _told(http, engine.sleep(SleepLevel(asked.level)))
    return _answer(serving)


@route(
    "POST", "/wake_up", "wakeUp", "Operate", "Load weights again, if they were given back, and answer then",
    {JSON: IsSleeping}, refusals=BODILESS,
)  # fmt: skip
async def wake_up(service: Service, http: Request) -> Response:
    check_origin(http)
    serving = [each.engine for each in service.lifecycle.require_resident()]
    for engine in serving:
        await _told(http, engine.wake_up())
    return _answer(serving)


@route(
    "GET", "/is_sleeping", "isSleeping", "Operate", "Whether weights and KV cache are given back", {JSON: IsSleeping},
    refusals=(403, 503),
)  # fmt: skip
async def is_sleeping(service: Service, http: Request) -> Response:
    return _answer([each.engine for each in service.lifecycle.require_resident()])


async def _told(http: Request, work: Coroutine[Any, Any, None]) -> None:
    try:
        await while_waited_for(http.receive, work)
    except SleepError as error:
        raise Unavailable(str(error)) from error


def _answer(serving: Sequence[EngineClient]) -> Response:
    return json_response(IsSleeping(Engines(serving).health().sleep_level > 0))
