"""Route WS /v1/realtime: live transcription of speech, with the events of OpenAI's transcription sessions."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.audio import realtime_types
from server.api.audio.session import LiveSession
from server.api.route import JSON, route
from server.api.service import Service
from server.http.body import read_query
from server.http.call import call_of
from server.http.origins import check_socket_origin
from server.http.schema import Name
from server.http.websocket import socket_of
from server.models import lookup


class RealtimeQuery(Struct):
    """Query parameters of a connection. `intent`: sent by OpenAI's clients; only transcription is supported."""

    model: Name | None = None
    intent: Literal["transcription"] | None = None


@route(
    "GET", "/v1/realtime", "createRealtimeSession", "Audio",
    "Write down speech while it is spoken, over a WebSocket", {JSON: realtime_types.ServerEvent},
    refusals=(400, 403, 404, 426, 429, 503), query=RealtimeQuery, is_socket=True,
)  # fmt: skip
async def create_realtime_session(service: Service, http: Request) -> ASGIApp:
    socket = socket_of(http.scope)
    check_socket_origin(http.scope, service.config.cors_origin)
    query = read_query(http, RealtimeQuery, service.config)
    call = call_of(http)
    loaded = await lookup.transcribed_by(call, service.lifecycle.require_model(), query.model)
    return LiveSession(service, call, loaded, socket)
