"""Web pages: the chat page at /, API documentation at /docs, and the server's activity at /dashboard.

The dashboard reads /dashboard/feed, which sends one event per second, and /dashboard/texts, the text of one request."""

from __future__ import annotations

from functools import cache, partial
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api import openapi
from server.api.route import EVENTS, HTML, JSON, TEXT, Route, route
from server.api.service import Service
from server.http import pages
from server.http.answers import json_response
from server.http.body import read_query
from server.http.call import call_of
from server.http.errors import TextsNotFound, clip
from server.http.schema import Json
from server.http.sse import event_source
from server.models.dashboard import Feed


@route("GET", "/", "chatPage", "Pages", "The built-in chat page", {HTML: None})
async def chat(service: Service, http: Request) -> Response:
    return await pages.page("index.html", http)


@route(
    "GET", "/web/{version}/{name}", "pageAsset", "Pages", "Scripts and styles of the pages", {TEXT: None},
    refusals=(404,), parameters={"version": "The hash of all of them", "name": "A file"},
)  # fmt: skip
async def asset(service: Service, http: Request) -> Response:
    version, name = http.path_params["version"], http.path_params["name"]
    return await pages.asset(version, name, http)


_NUM_CHARS = 30_000  # of the document: 8 ms, once


@route("GET", "/openapi.json", "openapi", "Pages", "This document", {JSON: Json})
async def document(service: Service, http: Request) -> Response:
    config = service.config
    from server.api.routes import ROUTES  # which imports every route, this one too

    user_key = bool(config.api_key) or config.api_key_file is not None
    admin_key = config.admin_api_key is not None
    file = await call_of(http).run(_NUM_CHARS, lambda: _document(ROUTES, user_key, admin_key))
    return pages.answer(file, http, "no-cache")


@cache
def _document(routes: tuple[Route, ...], user_key: bool, admin_key: bool) -> pages.PageFile:
    return pages.PageFile.of("openapi.json", openapi.document(routes, user_key=user_key, admin_key=admin_key))


@route("GET", "/docs", "docsPage", "Pages", "This document as a page", {HTML: None})
async def docs(service: Service, http: Request) -> Response:
    return await pages.page("docs.html", http)


CHARS_PER_ID = 4


@route("GET", "/dashboard", "dashboardPage", "Pages", "What the server does, drawn", {HTML: None})
async def dashboard(service: Service, http: Request) -> Response:
    return await pages.page("dashboard.html", http)


class TextsQuery(Struct, kw_only=True):
    """Query parameters for a request's texts. `id`: id of the sequence in the feed."""

    id: Annotated[str, Meta(min_length=1, max_length=512)]


class RequestTexts(Struct):
    prompt: str
    answer: str


@route(
    "GET", "/dashboard/texts", "requestTexts", "Pages",
    "What a request asked and was answered, where --log-requests keeps it", {JSON: RequestTexts},
    refusals=(400, 403, 404, 503), query=TextsQuery,
)  # fmt: skip
async def texts(service: Service, http: Request) -> Response:
    asked, kept = read_query(http, TextsQuery, service.config), service.texts
    ids = None if kept is None else kept.find(asked.id)
    if ids is None:
        why = "the server keeps none without --log-requests" if kept is None else "it has not ended, or is too long ago"
        raise TextsNotFound(f"There are no texts of the request {clip(asked.id)}: {why}")

    def decoded() -> RequestTexts:
        decode = partial(ids.model.tokenizer.decode, skip_special_tokens=False)
        return RequestTexts(decode(ids.prompt), decode(ids.answer))

    return json_response(await call_of(http).run(CHARS_PER_ID * ids.num, decoded))


@route("GET", "/dashboard/feed", "dashboardFeed", "Pages", "What the server does, each second", {EVENTS: None})
async def feed(service: Service, http: Request) -> ASGIApp:
    assert service.feed is not None, "create_app made one"
    return _FeedResponse(service.feed, service.config.ping_interval)


class _FeedResponse:
    """Response that streams the feed until the client disconnects."""

    def __init__(self, feed: Feed, ping_interval_s: float) -> None:
        self._feed = feed
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.watching() as watch:
            await event_source(watch, self._ping_interval_s)(scope, receive, send)
