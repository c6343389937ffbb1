"""GET /dashboard, which shows what the server does, and GET /dashboard/feed, by which it learns of it: an event a second."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http import pages
from server.loaded.feed import Feed
from server.route import EVENTS, HTML, Operation, route
from server.service import Service


@route("GET", "/dashboard", Operation("dashboardPage", "Pages", "What the server does, drawn", {HTML: None}))
async def page(service: Service, http: Request) -> Response:
    return await pages.page("dashboard.html", http, service.offload)


@route(
    "GET", "/dashboard/feed", Operation("dashboardFeed", "Pages", "What the server does, each second", {EVENTS: None})
)
async def feed(service: Service, http: Request) -> ASGIApp:
    found = service.added_part(Feed)
    assert found is not None, "create_app made one"
    return _FeedResponse(found, service.config.ping_interval)


class _FeedResponse:
    """Owns the watching, so that who leaves ends it."""

    def __init__(self, feed: Feed, ping_interval_s: float) -> None:
        self._feed = feed
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from server.http.event_source import EventSource  # few watch, and nobody else shall pay

        with self._feed.watching() as watch:
            await EventSource(watch, self._ping_interval_s)(scope, receive, send)
