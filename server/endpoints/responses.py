"""POST /v1/responses, and what can be done with a stored response: retrieve, cancel, delete, input items."""

from __future__ import annotations

from orjson import Fragment
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from server.errors import InvalidRequest, clip
from server.generate.collect import collect
from server.http.body import json_response, read_request
from server.http.sse import ClientWatch, EventStream
from server.responses.background import BackgroundRun
from server.responses.body import render
from server.responses.prepare import Prepared, caller_of, prepare
from server.responses.query import InputItemsQuery, RetrieveQuery, read_query
from server.responses.replay import Replay, ReplayResponse
from server.responses.store import Entry, ResponseStore
from server.responses.streaming import AnnouncedStream, EventFrames
from server.responses.wire import RESPONSES
from server.service import Service

ENDED = "it ended before it was complete: its client left, or the server failed"


class Responses:
    """The handlers of these routes. `store`: where responses are kept."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def create(self, service: Service, http: Request) -> ASGIApp:
        served = service.lifecycle.served()
        wire = await read_request(http, RESPONSES, service.config)
        served.check_name(wire.model)
        prepared = await prepare(service, self._store, served, http, wire)
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
            return EventStream(
                lambda: AnnouncedStream(prepared.generation.open()), EventFrames(prepared.response_events, finished),
                ping_interval_s=service.config.ping_interval, done=b"",
            )  # fmt: skip
        await collect(prepared.generation, ClientWatch(http.receive), prepared.response_events.feed)
        prepared.response_events.end()
        return _json(finished())

    def _in_background(self, service: Service, prepared: Prepared, *, streams: bool) -> ASGIApp:
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
        query = read_query(http, RetrieveQuery, service.config)
        entry = self._entry(http)
        if not query.stream:
            if query.starting_after is not None:
                raise InvalidRequest("starting_after is only allowed when stream is true", param="starting_after")
            return _json(entry.body_now)
        if entry.events is None:
            raise InvalidRequest(
                "only a response that was made with background true and stream true can be streamed again",
                param="stream",
            )
        return _replay(service, entry, 0 if query.starting_after is None else query.starting_after + 1)

    async def cancel(self, service: Service, http: Request) -> ASGIApp:
        """Ends a response that is being made; one that has ended is returned as it is."""
        entry = self._entry(http)
        if not entry.is_background:
            raise InvalidRequest("Cannot cancel a synchronous response.")
        await _stop(entry)
        return _json(entry.body_now)

    async def delete(self, service: Service, http: Request) -> ASGIApp:
        entry = self._entry(http)
        self._store.delete(entry)
        await _stop(entry)
        return json_response({"id": entry.id, "object": "response", "deleted": True})

    async def input_items(self, service: Service, http: Request) -> ASGIApp:
        """Lists what the model has read beside the instructions: the input and output of earlier responses come first."""
        query = read_query(http, InputItemsQuery, service.config)
        items = [*self._entry(http).conversation()]
        if query.order == "desc":
            items.reverse()
        first = 0
        if query.after is not None:
            first = 1 + next((number for number, item in enumerate(items) if item.id == query.after), -1)
            if not first:
                raise InvalidRequest(f"after names {clip(query.after)!r}, which is none of the items", param="after")
        page = items[first : first + query.limit]
        return _json(
            render(
                {
                    "object": "list",
                    "data": [Fragment(item.json) for item in page],
                    "first_id": page[0].id if page else None,
                    "last_id": page[-1].id if page else None,
                    "has_more": first + len(page) < len(items),
                }
            )
        )

    def _entry(self, http: Request) -> Entry:
        """Raises ResponseNotFound."""
        return self._store.get(http.path_params["response_id"], caller_of(http))


async def _stop(entry: Entry) -> None:
    if entry.ongoing is not None:
        await entry.ongoing.cancel()


def _replay(service: Service, entry: Entry, first: int) -> ASGIApp:
    assert entry.events is not None, "who asks has looked"
    return ReplayResponse(Replay(entry.events, first, entry.ongoing), service.config.ping_interval)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
