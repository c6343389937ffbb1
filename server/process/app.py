"""create_app: the route table, inside the middleware around every request.

It uses a Router, since a Starlette adds two error layers, which would wrap every message of every stream."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

from starlette.requests import Request
from starlette.routing import Route as PathRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.route import Route
from server.api.routes import ERROR_SHAPES, ROUTES
from server.api.service import Service
from server.batches.folder import BatchFolder
from server.batches.lines import LINE_EXTRA_BYTES, URLS
from server.batches.runner import BatchRunner
from server.config.server_config import ServerConfig
from server.http.auth import Keys, RequireKey, is_loopback
from server.http.call import call_in
from server.http.metrics import HttpStats
from server.http.middleware import RequestMiddleware
from server.http.origins import LOOPBACK_NAMES, CheckHost, CrossOrigin
from server.http.tracing import trace_headers
from server.models.dashboard import Feed, RecentTexts, Snapshots

logger = logging.getLogger("oneloop.http")


class HandlerApp:
    """ASGI application of one handler. It sends the response that the handler returns."""

    def __init__(self, route: Route, service: Service) -> None:
        self._route = route
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_in(scope)
        call.route, call.offload = self._route.path, self._service.offload
        call.default_timeout_s = self._service.config.request_timeout
        if self._service.config.otlp_traces_endpoint is not None:
            call.trace_headers = trace_headers(call.headers)
        if 429 in self._route.refusals:  # before a body is read that nobody has room for
            self._service.lifecycle.require_model().engines.check_room(call.caller)
        response = await self._route.handler(self._service, Request(scope, receive, send))
        await response(scope, receive, send)


def allowed_hosts(config: ServerConfig) -> Collection[str]:
    """Return the allowed hosts, from the options or the address. Over a Unix socket, which browsers cannot reach: any."""
    if config.uds is not None:
        return ("*",)
    if config.allowed_host or is_loopback(config.host):
        return (*LOOPBACK_NAMES, config.host, *config.allowed_host)
    return ("*",)


def line_apps(service: Service) -> dict[str, ASGIApp]:
    """Return the endpoints for lines of a batch, by URL. They handle errors, but check no API keys and add no CORS headers.

    Fields that would be ignored are rejected, because a line has no response header that could list them. Responses are not
    stored for later retrieval, and no client connection is watched."""
    config = replace(service.config, strict_fields=True, max_stored_responses=0, request_timeout=None)
    own = Service(config, service.lifecycle, service.offload)
    return {
        route.path: RequestMiddleware(HandlerApp(route, own), stats=own.http_stats, access_log=False)
        for route in ROUTES
        if route.path in URLS
    }


def start_batches(service: Service, folder: BatchFolder) -> BatchRunner:
    """Resume the batches in `folder` and accept new batches. Call it on the running event loop."""
    config = service.config
    runner = BatchRunner(
        folder,
        line_apps(service),
        service.lifecycle,
        limit_bytes=config.max_body_size + LINE_EXTRA_BYTES,
        max_at_work=config.max_batch_requests or None,
        by_priority=config.scheduling_policy == "priority",
    )
    runner.resume()
    service.lifecycle.when_draining(runner.leave)
    return runner


def create_app(service: Service) -> ASGIApp:
    """Return the routes with their middleware (see `guarded`). Routes of disabled features are left out."""
    config = service.config
    paths = [PathRoute(each.path, HandlerApp(each, service), methods=[each.method]) for each in ROUTES]
    lifecycle = service.lifecycle
    if config.log_requests:
        service.texts = RecentTexts()
        lifecycle.when_loaded(service.texts.watch)
    service.feed = Feed(Snapshots(lifecycle, lambda: service.http_stats.in_flight, has_texts=service.texts is not None))
    lifecycle.when_draining(service.feed.close)
    lifecycle.when_draining(service.sockets.leave)
    service.batch_folder = folder = BatchFolder.of(config)
    if folder is not None:
        service.batches = start_batches(service, folder)
    secret = None if folder is None else folder.secret
    return guarded(Router(paths, redirect_slashes=False), config, service.http_stats, secret)


def guarded(app: ASGIApp, config: ServerConfig, stats: HttpStats, secret: bytes | None = None) -> ASGIApp:
    """Wrap `app` in the middleware of every request. From the outside in: CORS headers, errors and log, hosts, preflights, keys.
    `secret`: key of caller digests; processes with the same `secret` compute the same digests."""
    keys = Keys(config.user_keys(), config.admin_api_key, secret)
    is_private = config.uds is not None or is_loopback(config.host)
    if keys or not is_private:
        app = RequireKey(app, keys, [each.path for each in ROUTES], is_private=is_private)
    if not keys.has_user and not is_loopback(config.host):
        logger.warning("no --api-key is set: every client that can connect to %s may use this server", config.host)
    cors = None
    if config.cors_origin:
        methods = {"HEAD", *(each.method for each in ROUTES)}
        cors = CrossOrigin(config.cors_origin, credentials=config.cors_credentials, methods=methods)
        app = cors.preflights(app)
    app = CheckHost(app, allowed_hosts(config))
    app = RequestMiddleware(app, stats=stats, access_log=config.access_log, error_shapes=ERROR_SHAPES)
    return app if cors is None else cors.around(app)
