"""From a request to a response that can begin: its conversation found and read, a GenerateRequest made of it and started.

What is stored of an earlier response stands before the input; its instructions do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request as HttpRequest

from server.errors import ContextLengthExceeded, InvalidRequest
from server.generate.conversation import chat_ids
from server.generate.generation import Generation
from server.generate.request import Chat, GenerateRequest
from server.generate.start import start
from server.http.auth import caller_key, is_admin
from server.http.body import note_ignored
from server.http.middleware import arrival_s
from server.loaded.model import LoadedModel
from server.responses import input_items
from server.responses.body import Head, render
from server.responses.events import ResponseEvents
from server.responses.input_items import Item, ItemReference, new_id
from server.responses.messages import messages_of, with_one_head
from server.responses.requests import NAMES, generate_request
from server.responses.store import Caller, Entry, ResponseStore, StoredItem
from server.responses.truncation import longest
from server.responses.wire import ResponsesRequest
from server.service import Service


@dataclass(frozen=True, slots=True)
class Prepared:
    """A response that has not begun. `entry`: what the store would keep of it; None: it is not stored."""

    response_events: ResponseEvents
    generation: Generation
    entry: Entry | None

    def settle(self) -> bytes:
        """The response, which is finished. The entry gets its contents; adding it to the store is the caller's part."""
        final = self.response_events.body
        rendered = render(final)
        if self.entry is not None:
            self.entry.output = tuple(StoredItem(item["id"], render(item)) for item in final["output"])
            self.entry.final_status = self.response_events.status
            self.entry.body = rendered
        return rendered


def caller_of(http: HttpRequest) -> Caller:
    return Caller(caller_key(http.scope), is_admin(http.scope))


async def prepare(
    service: Service, store: ResponseStore, served: LoadedModel, http: HttpRequest, wire: ResponsesRequest
) -> Prepared:
    """Raises ApiError."""
    caller = caller_of(http)
    is_stored = _is_stored(store, wire)
    previous = None
    if wire.previous_response_id is not None:
        previous = _previous(store, wire.previous_response_id, caller)
    given = _resolved(store, caller, input_items.read(wire.input))
    earlier = [] if previous is None else [*previous.conversation(), *previous.output]
    num_chars = sum(len(stored.json) for stored in earlier)
    items = await service.offload.run(num_chars, lambda: [*map(_read, earlier), *given])
    input_items.check_outputs(items)

    if wire.truncation == "auto":
        items = await longest(items, partial(_fits, service, served, wire))
    request = _request(served, wire, items)
    id = new_id("resp_")
    with NAMES.spoken():
        generation, ignored = await start(
            service.config, service.offload, served, request, id=id, arrival_s=arrival_s(http.scope)
        )
    note_ignored(http, [*wire.left_undone(), *map(NAMES.name_of, ignored)], service.config)

    head = Head.of(id, wire, generation, model=served.name, stored=is_stored)
    response_events = ResponseEvents(head, generation, in_background=bool(wire.background))
    entry = None
    if is_stored:
        stored = tuple(StoredItem(item.id or "", render(input_items.to_json(item))) for item in given)
        entry = Entry(id, caller.key, stored, previous, is_background=bool(wire.background))
    return Prepared(response_events, generation, entry)


def _is_stored(store: ResponseStore, wire: ResponsesRequest) -> bool:
    if store.keeps:
        return wire.store is not False
    if wire.store or wire.background:
        raise InvalidRequest(
            "this server stores no responses (--max-stored-responses 0)", param="store" if wire.store else "background"
        )
    return False


def _previous(store: ResponseStore, id: str, caller: Caller) -> Entry:
    entry = store.get_previous(id, caller)
    if entry.status not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"Response {id} is {entry.status}: only what has been completed can be continued",
            param="previous_response_id",
        )
    return entry


def _request(served: LoadedModel, wire: ResponsesRequest, items: Sequence[Item]) -> GenerateRequest:
    messages = with_one_head(messages_of(items, wire.instructions), served.chat_template)
    return generate_request(wire, messages)


async def _fits(service: Service, served: LoadedModel, wire: ResponsesRequest, items: Sequence[Item]) -> bool:
    """Whether a prompt of `items` leaves room for the answer."""
    request = _request(served, wire, items)
    try:
        with NAMES.spoken():
            assert isinstance(request.prompt, Chat), "it was made here"
            ids = await chat_ids(served, service.offload, request.prompt)
    except ContextLengthExceeded:
        return False
    return len(ids) + (wire.max_output_tokens or 1) <= served.engine.model.max_model_len


def _read(stored: StoredItem) -> Item:
    return input_items.from_json(stored.json)


def _resolved(store: ResponseStore, caller: Caller, given: Sequence[Item | ItemReference]) -> list[Item]:
    """The items of `given`, with those that references stand for."""
    wanted = {item.id for item in given if isinstance(item, ItemReference)}
    there = store.items(wanted, caller) if wanted else {}
    found: list[Item] = []
    for number, item in enumerate(given):
        if not isinstance(item, ItemReference):
            found.append(item)
        elif item.id in there:
            found.append(_read(there[item.id]))
        else:
            raise InvalidRequest(f"Item with id '{item.id}' not found.", param=f"input[{number}].id")
    return found
