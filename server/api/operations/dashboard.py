"""GET /dashboard, which shows what the server does, and GET /dashboard/feed, by which it learns of it: an event a second; and
GET /dashboard/texts, what a request was about."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.route import EVENTS, HTML, JSON, Operation, route
from server.api.service import Service
from server.http import pages
from server.http.answers import json_response
from server.http.body import read_query
from server.http.errors import TextsNotFound, clip
from server.http.sse import event_source
from server.models.feed import Feed
from server.models.texts import Texts

CHARS_PER_ID = 4


@route("GET", "/dashboard", Operation("dashboardPage", "Pages", "What the server does, drawn", {HTML: None}))
async def page(service: Service, http: Request) -> Response:
    return await pages.page("dashboard.html", http, service.offload)


class TextsQuery(Struct, kw_only=True):
    """`id`: the sequence's, as the feed has it."""

    id: Annotated[str, Meta(min_length=1, max_length=512)]


class RequestTexts(Struct):
    prompt: str
    answer: str


@route(
    "GET", "/dashboard/texts",
    Operation(
        "requestTexts", "Pages", "What a request asked and was answered, where --log-requests keeps it", {JSON: RequestTexts},
        refusals=(400, 403, 404, 503), query=TextsQuery,
    ),
)  # fmt: skip
async def texts(service: Service, http: Request) -> Response:
    asked, kept = read_query(http, TextsQuery, service.config), service.added_part(Texts)
    ids = None if kept is None else kept.find(asked.id)
    if ids is None:
        why = "the server keeps none without --log-requests" if kept is None else "it has not ended, or is too long ago"
        raise TextsNotFound(f"There are no texts of the request {clip(asked.id)}: {why}")

    def decoded() -> dict[str, str]:
        decode = partial(ids.model.tokenizer.decode, skip_special_tokens=False)
        return {"prompt": decode(ids.prompt), "answer": decode(ids.answer)}

    return json_response(await service.offload.run(CHARS_PER_ID * ids.num, decoded))


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
        with self._feed.watching() as watch:
            await event_source(watch, self._ping_interval_s)(scope, receive, send)
