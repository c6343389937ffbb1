"""Routes POST /start_profile and /stop_profile, as in vLLM: trace the engine's steps and the event loop."""

from __future__ import annotations

import tempfile
import time
import uuid
from functools import cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from runtime.api import ProfileError
from server.api.operations.operate import check_origin
from server.api.route import BODY_REFUSALS, JSON, route
from server.api.service import Service
from server.config.server_config import ServerConfig
from server.http.answers import json_response
from server.http.body import read_request
from server.http.errors import Conflict
from server.http.schema import Wire

SUFFIX = ".trace.json.gz"
MAX_STEPS = 1_000_000


class StartProfile(Struct, kw_only=True):
    """Body of a request to start a profile. `delay_iterations`: number of steps before the trace starts. `max_iterations`:
    number of steps to trace; without it, /stop_profile ends the trace. `profile_prefix`: prefix of the file name."""

    profile_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "oneloop"
    delay_iterations: Annotated[int, Meta(ge=0, le=MAX_STEPS)] = 0
    max_iterations: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None

    def check(self) -> None:
        """Do nothing, because the field types check all values."""


START = Wire(StartProfile, {})


class Profile(Struct):
    """Path of the finished trace file on the server. Open the file in ui.perfetto.dev or chrome://tracing."""

    path: str


@cache
def _temporary_folder() -> Path:
    """Create a folder that only this user can read, and return its path."""
    return Path(tempfile.mkdtemp(prefix="oneloop-profiles-"))


def _new_path(config: ServerConfig, prefix: str) -> Path:
    folder = _temporary_folder() if config.profile_dir is None else Path(config.profile_dir).resolve()
    return folder / f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}{SUFFIX}"


@route(
    "POST", "/start_profile", "startProfile", "Operate",
    "Record what is computed, and what the event loop does, for some steps or until /stop_profile", {JSON: Profile},
    StartProfile, (*BODY_REFUSALS, 403, 409), may_be_bodiless=True,
)  # fmt: skip
async def start(service: Service, http: Request) -> Response:
    engine = service.lifecycle.require_resident()[0].engine
    check_origin(http)
    given = StartProfile()
    if http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers:  # vLLM's needs no body
        given = await read_request(http, START, service.config)
    path = _new_path(service.config, given.profile_prefix)
    try:
        await engine.start_profile(path, delay_steps=given.delay_iterations, num_steps=given.max_iterations)
    except ProfileError as error:
        raise Conflict(str(error)) from error
    return json_response(Profile(str(path)))


@route(
    "POST", "/stop_profile", "stopProfile", "Operate", "End the profile, and answer when its trace is written",
    {JSON: Profile}, refusals=(403, 409, 415, 503),
)  # fmt: skip
async def stop(service: Service, http: Request) -> Response:
    check_origin(http)
    refusal: ProfileError | None = None
    for engine in service.lifecycle.require_model().engines:  # the one it was begun with may have made room for another
        try:
            return json_response(Profile(str(await engine.stop_profile())))
        except ProfileError as error:
            refusal = refusal or error
    raise Conflict(str(refusal))
