"""create_app: the routes table, inside the layer that surrounds every request.

A Router, not a Starlette: that class adds two layers for errors, which `RequestMiddleware` handles as well, and each of them would
wrap every message of every stream."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from server.anthropic.errors import AnthropicErrors
from server.config import ServerConfig
from server.endpoints import (
    chat,
    completions,
    health,
    messages,
    metrics,
    models,
    openapi,
    responses,
    tokenize,
    version,
    web,
)
from server.errors import ErrorShape
from server.http.auth import Keys, RequireKey, is_loopback
from server.http.cors import CrossOrigin
from server.http.middleware import RequestMiddleware
from server.responses.store import ResponseStore
from server.service import Service

logger = logging.getLogger("oneloop.http")

Handler = Callable[[Service, Request], Awaitable[ASGIApp]]

Entry = tuple[str, str, Handler]  # method, path and who answers

ROUTES: tuple[Entry, ...] = (
    ("GET", "/", web.page),
    ("POST", "/v1/chat/completions", chat.create),
    ("POST", "/v1/completions", completions.create),
    ("POST", "/v1/messages", messages.create),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
    ("GET", "/v1/models", models.list_all),
    ("GET", "/v1/models/{model_id:path}", models.retrieve),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    ("GET", "/health", health.health),
    ("GET", "/metrics", metrics.metrics),
    ("GET", "/version", version.version),
    ("GET", "/openapi.json", openapi.document),
    ("GET", "/docs", openapi.page),
)


def responses_routes(store: ResponseStore) -> tuple[Entry, ...]:
    """The routes of /v1/responses, which keep their answers in `store`."""
    own = responses.Responses(store)
    return (
        ("POST", "/v1/responses", own.create),
        ("GET", "/v1/responses/{response_id}", own.retrieve),
        ("DELETE", "/v1/responses/{response_id}", own.delete),
        ("POST", "/v1/responses/{response_id}/cancel", own.cancel),
        ("GET", "/v1/responses/{response_id}/input_items", own.input_items),
    )


def routes_of(config: ServerConfig) -> tuple[Entry, ...]:
    """Every route of a server with `config`, with a store of responses of its own."""
    return ROUTES + responses_routes(ResponseStore(config.max_stored_responses, config.max_stored_bytes))


# Where clients do not read errors as OpenAI's do; it holds for what is below a path too.
ERROR_SHAPES: Mapping[str, ErrorShape] = MappingProxyType({"/v1/messages": AnthropicErrors()})


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
    """From the outside in: CORS headers, errors and log, preflights, keys, routes. What is not asked for is not there."""
    config = service.config
    entries = routes_of(config)
    routes = [Route(path, Endpoint(path, handler, service), methods=[method]) for method, path, handler in entries]
    app: ASGIApp = Router(routes, redirect_slashes=False)
    keys = Keys(config.user_keys(), config.admin_api_key)
    if keys:
        app = RequireKey(app, keys, [path for _, path, _ in entries])
    if not keys.has_user and not is_loopback(config.host):
        logger.warning("anybody who reaches %s may use this server: no --api-key was given", config.host)
    cors = None
    if config.cors_origin:
        methods = {"HEAD", *(method for method, _, _ in entries)}
        cors = CrossOrigin(config.cors_origin, credentials=config.cors_credentials, methods=methods)
        app = cors.preflights(app)
    app = RequestMiddleware(app, stats=service.http_stats, access_log=config.access_log, error_shapes=ERROR_SHAPES)
    return app if cors is None else cors.around(app)
