"""Routes POST /v1/responses, and routes of a stored response: retrieve, cancel, delete and list input items."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from server.api.frames import encoded
from server.api.response_store import Entry, ResponseStore
from server.api.responses import api_types
from server.api.responses.background import BackgroundRun, Replay
from server.api.responses.compact import compacted
from server.api.responses.events import EventFrames
from server.api.responses.prepare import PreparedResponse, caller_of, counted, prepare
from server.api.responses.request_types import COMPACT, COUNT, RESPONSES, Includable
from server.api.route import BODY_REFUSALS, EVENTS, GENERATION_REFUSALS, JSON, Handler, Route
from server.api.service import Service
from server.config.server_config import ServerConfig
from server.generate.collect import collect
from server.http.answers import json_response
from server.http.body import read_query, read_request
from server.http.call import call_of
from server.http.errors import InvalidRequest, UnsupportedParameter, clip
from server.http.schema import Name
from server.http.sse import EventStream, event_source
from server.http.watch import ClientWatch, while_waited_for
from server.models import lookup

ENDED = "it ended before it was complete: its client left, or the server failed"


class RetrieveQuery(Struct, kw_only=True):
    """Query parameters to retrieve a response. `starting_after`: number of the last event that the client has received."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None
    include: list[Includable] | None = None  # what there is, is always shown
    include_obfuscation: bool | None = None


class InputItemsQuery(Struct, kw_only=True):
    """Query parameters to list input items. `after`: id of the last item on the previous page."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Name | None = None
    include: list[Includable] | None = None


Q = TypeVar("Q", RetrieveQuery, InputItemsQuery)


def _read(http: Request, kind: type[Q], config: ServerConfig) -> Q:
    found = read_query(http, kind, config, lists=("include",))
    if isinstance(found, RetrieveQuery) and found.include_obfuscation:
        raise UnsupportedParameter("include_obfuscation")
    return found


class Responses:
    """Handlers of the routes of /v1/responses. `store`: the store of responses."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def create(self, service: Service, http: Request) -> ASGIApp:
        loaded = service.lifecycle.require_model()
        wire = await read_request(http, RESPONSES, service.config)
        loaded = await lookup.named(call_of(http), loaded, wire.model, to_chat=True)
        prepared = await while_waited_for(http.receive, prepare(service, self._store, loaded, http, wire))
        if wire.background:
            return self._in_background(service, prepared, streams=bool(wire.stream))

        def finished() -> bytes:
            body = prepared.settle()
            if prepared.entry is not None:
                self._store.add(prepared.entry)
            return body

        if wire.stream:
            if prepared.entry is not None:
                self._store.note(prepared.entry.id, caller_of(http), ENDED)  # until it is there
            frames, interval_s = EventFrames(prepared.response_events, finished), service.config.ping_interval
            return EventStream(
                prepared.generation.open, frames, ping_interval_s=interval_s, done=b"", begin=frames.begin
            )
        await collect(prepared.generation, ClientWatch(http.receive), prepared.response_events.feed)
        prepared.response_events.end()
        return _json(finished())

    def _in_background(self, service: Service, prepared: PreparedResponse, *, streams: bool) -> ASGIApp:
        entry = prepared.entry
        assert entry is not None, "what is in the background is stored"

        def finished() -> None:
            prepared.settle()
            self._store.finish(entry)

        stream = prepared.generation.open()
        run = entry.ongoing = BackgroundRun(prepared.response_events, stream, keeps_events=streams, finished=finished)
        entry.events = run.events
        self._store.add(entry)
        return _replay(service, entry, 0) if streams else _json(run.body)

    async def retrieve(self, service: Service, http: Request) -> ASGIApp:
        query = _read(http, RetrieveQuery, service.config)
        entry = self._entry(http)
        if not query.stream:
            if query.starting_after is not None:
                raise InvalidRequest("starting_after is only allowed when stream is true", param="starting_after")
            return _json(entry.body_now)
        if entry.events is None:
            raise InvalidRequest(
                "only a response created with background true and stream true can be streamed again",
                param="stream",
            )
        return _replay(service, entry, 0 if query.starting_after is None else query.starting_after + 1)

    async def cancel(self, service: Service, http: Request) -> ASGIApp:
        """Cancel a response in progress. A finished response is returned unchanged."""
        entry = self._entry(http)
        if not entry.is_background:
            raise InvalidRequest("Cannot cancel a synchronous response.")
        await _stop(entry)
        return _json(entry.body_now)

    async def delete(self, service: Service, http: Request) -> ASGIApp:
        entry = self._entry(http)
        self._store.delete(entry)
        await _stop(entry)
        return json_response(api_types.DeletedResponse(id=entry.id))

    async def input_items(self, service: Service, http: Request) -> ASGIApp:
        """List the items before the response's output, including those of earlier responses. Instructions are not included."""
        query = _read(http, InputItemsQuery, service.config)
        items = [*self._entry(http).conversation()]
        if query.order == "desc":
            items.reverse()
        first = 0
        if query.after is not None:
            first = 1 + next((number for number, item in enumerate(items) if item.id == query.after), -1)
            if not first:
                raise InvalidRequest(
                    f"after names {clip(query.after)!r}, which is not the id of an item", param="after"
                )
        page = items[first : first + query.limit]
        return json_response(
            api_types.InputItems(
                data=[encoded(item.json) for item in page],
                first_id=page[0].id if page else None,
                last_id=page[-1].id if page else None,
                has_more=first + len(page) < len(items),
            )
        )

    async def count_tokens(self, service: Service, http: Request) -> ASGIApp:
        """Return the number of prompt tokens that the same request to /v1/responses would have."""
        loaded = service.lifecycle.require_model()
        wire = await read_request(http, COUNT, service.config)
        loaded = await lookup.named(call_of(http), loaded, wire.model, to_chat=True)
        num_tokens = await counted(service, self._store, loaded, http, wire)
        return json_response(api_types.InputTokens(input_tokens=num_tokens))

    async def compact(self, service: Service, http: Request) -> ASGIApp:
        loaded = service.lifecycle.require_model()
        wire = await read_request(http, COMPACT, service.config)
        loaded = await lookup.named(call_of(http), loaded, wire.model, to_chat=True)
        return json_response(await compacted(service, self._store, loaded, http, wire))

    def _entry(self, http: Request) -> Entry:
        """Return the stored entry for the response id in the path. Raises ResponseNotFound."""
        return self._store.get(http.path_params["response_id"], caller_of(http))


async def _stop(entry: Entry) -> None:
    if entry.ongoing is not None:
        await entry.ongoing.cancel()


def _replay(service: Service, entry: Entry, first: int) -> ASGIApp:
    assert entry.events is not None, "who asks has looked"
    return event_source(Replay(entry.events, first, entry.ongoing), service.config.ping_interval)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


# --- routes -------------------------------------------------------------------------------------------------------


def _of_service(method: Callable[[Responses, Service, Request], Awaitable[ASGIApp]]) -> Handler:
    """Return a route handler that calls `method` of a Responses object with the service's store."""

    async def handler(service: Service, http: Request) -> ASGIApp:
        return await method(Responses(service.responses), service, http)

    return handler


_ID = {"response_id": "The id of a response"}
CREATE = Route(
    _of_service(Responses.create), "POST", "/v1/responses", "createResponse", "Responses",
    "Answer a conversation; with `stream`, as server-sent events, with `background`, later",
    {JSON: api_types.Response, EVENTS: api_types.ResponseEvent}, api_types.CreateResponse, GENERATION_REFUSALS,
)  # fmt: skip
COUNT_TOKENS = Route(
    _of_service(Responses.count_tokens), "POST", "/v1/responses/input_tokens", "countResponseTokens", "Responses",
    "Tokens of the prompt that a request would make", {JSON: api_types.InputTokens}, api_types.CountTokens, BODY_REFUSALS,
)  # fmt: skip
COMPACT_RESPONSE = Route(
    _of_service(Responses.compact), "POST", "/v1/responses/compact", "compactResponse", "Responses",
    "Make a conversation short: what its users said, and a summary by the model", {JSON: api_types.CompactedResponse},
    api_types.CompactResponse, GENERATION_REFUSALS,
)  # fmt: skip
RETRIEVE = Route(
    _of_service(Responses.retrieve), "GET", "/v1/responses/{response_id}", "retrieveResponse", "Responses",
    "A stored response; with `stream`, the events of one in the background",
    {JSON: api_types.Response, EVENTS: api_types.ResponseEvent}, None, (400, 404), query=RetrieveQuery, parameters=_ID,
)  # fmt: skip
DELETE = Route(
    _of_service(Responses.delete), "DELETE", "/v1/responses/{response_id}", "deleteResponse", "Responses",
    "Forget a stored response; one that is being made is cancelled", {JSON: api_types.DeletedResponse}, None, (404,),
    parameters=_ID,
)  # fmt: skip
CANCEL = Route(
    _of_service(Responses.cancel), "POST", "/v1/responses/{response_id}/cancel", "cancelResponse", "Responses",
    "End a response in the background", {JSON: api_types.Response}, None, (400, 404), parameters=_ID,
)  # fmt: skip
INPUT_ITEMS = Route(
    _of_service(Responses.input_items), "GET", "/v1/responses/{response_id}/input_items", "listInputItems", "Responses",
    "What a stored response answers, earlier responses included", {JSON: api_types.InputItems}, None, (400, 404),
    query=InputItemsQuery, parameters=_ID,
)  # fmt: skip
