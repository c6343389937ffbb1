"""create_app: the routes table, inside the layer that surrounds every request.

A Router, not a Starlette: that class adds two layers for errors, which `Surroundings` handles as well, and each of them would
wrap every message of every stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from server.endpoints import chat, completions, health, metrics, models, tokenize, version, web
from server.middleware import Surroundings
from server.service import Service

Handler = Callable[[Service, Request], Awaitable[ASGIApp]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/", web.page),
    ("POST", "/v1/chat/completions", chat.create),
    ("POST", "/v1/completions", completions.create),
    ("GET", "/v1/models", models.list_all),
    ("GET", "/v1/models/{model_id:path}", models.retrieve),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    ("GET", "/health", health.health),
    ("GET", "/metrics", metrics.metrics),
    ("GET", "/version", version.version),
)


class Endpoint:
    """A handler as an ASGI application: what it returns sends itself, straight to the server's `send`."""

    def __init__(self, path: str, handler: Handler, service: Service) -> None:
        self._path = path
        self._handler = handler
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route_path"] = self._path
        response = await self._handler(self._service, Request(scope, receive, send))
        await response(scope, receive, send)


def create_app(service: Service) -> ASGIApp:
    routes = [Route(path, Endpoint(path, handler, service), methods=[method]) for method, path, handler in ROUTES]
    router = Router(routes, redirect_slashes=False)
    return Surroundings(router, stats=service.http_stats, access_log=service.config.access_log)
