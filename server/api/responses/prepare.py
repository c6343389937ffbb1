"""Preparation of a response: loads and parses its conversation, and starts the generation.

Items of earlier responses precede the input. The instructions of earlier responses are not used."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from msgspec.json import encode
from starlette.requests import Request as HttpRequest

from server.api.response_store import Caller, Entry, ResponseStore, StoredItem
from server.api.responses import input_items
from server.api.responses.api_types import Response
from server.api.responses.events import ResponseEvents, ResponseStart
from server.api.responses.input_items import InputMessage, Item, ItemReference, new_id
from server.api.responses.messages import messages_of, with_joint_turns, with_one_head
from server.api.responses.request_types import CountRequest, FormatSchema, ResponsesRequest
from server.api.responses.tools import Tools
from server.api.responses.tools import read as read_tools
from server.api.service import Service
from server.generate.encode import chat_ids
from server.generate.generation import Generation
from server.generate.request import (
    Chat,
    ChatMessage,
    GenerateRequest,
    OutputConstraint,
    Shown,
    json_object,
    json_schema,
    one_constraint,
)
from server.generate.start import start
from server.http.call import Call, call_of, note_ignored
from server.http.errors import ContextLengthExceeded, FieldNames, InvalidRequest
from server.http.schema import JsonObject
from server.http.wire_fields import sampling_of
from server.models.model import LoadedModel


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """Response that is ready to start. `entry`: entry to add to the store, or None if the response is not stored."""

    response_events: ResponseEvents
    generation: Generation
    entry: Entry | None

    def settle(self) -> bytes:
        """Return the finished response as JSON, and copy it to `entry`. The caller adds `entry` to the store."""
        final = self.response_events.body
        encoded = encode(final)
        if self.entry is not None:
            self.entry.output = tuple(StoredItem(item.id, encode(item)) for item in final.output)
            self.entry.final_status = self.response_events.status
            self.entry.body = encoded
        return encoded


async def counted(
    service: Service, store: ResponseStore, loaded: LoadedModel, http: HttpRequest, wire: CountRequest
) -> int:
    """Return the number of prompt tokens that the request `wire` would have. Raises ApiError."""
    asked = await conversation(store, http, wire)
    items = asked.items
    if wire.truncation == "auto":
        items = await longest(items, partial(_fits, call_of(http), loaded, wire, asked))
    request = await call_of(http).run(asked.cost, lambda: request_of(loaded, wire, items, asked.tools))
    note_ignored(http, asked.ignored, service.config)
    with NAMES.spoken():
        assert isinstance(request.prompt, Chat), "it was made here"
        return len(await chat_ids(loaded, call_of(http), request.prompt))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation of a request. `items`: all items. `given`: items of the request itself. `ignored`: fields without effect."""

    items: list[Item]
    given: list[Item]
    previous: Entry | None
    tools: Tools
    ignored: list[str]
    cost: int  # of going through it, in characters


def caller_of(http: HttpRequest) -> Caller:
    return Caller(call_of(http).key, call_of(http).is_admin)


async def prepare(
    service: Service, store: ResponseStore, loaded: LoadedModel, http: HttpRequest, wire: ResponsesRequest
) -> PreparedResponse:
    """Prepare the response to `wire`, without running it. Raises ApiError."""
    is_stored = _is_stored(store, wire)
    asked = await conversation(store, http, wire)
    items = asked.items
    if wire.truncation == "auto":
        items = await longest(items, partial(_fits, call_of(http), loaded, wire, asked))
    request = await call_of(http).run(asked.cost, lambda: request_of(loaded, wire, items, asked.tools))
    id = new_id("resp_")
    with NAMES.spoken():
        generation, ignored = await start(service.config, call_of(http), loaded, request, id=id)
    note_ignored(http, [*asked.ignored, *map(NAMES.name_of, ignored)], service.config)

    made = Response.of(id, int(time.time()), wire, asked.tools, generation, model=loaded.name, stored=is_stored)
    head = ResponseStart(made, asked.tools.by_function, wire.wants_sealed_reasoning)
    response_events = ResponseEvents(head, generation, in_background=bool(wire.background))
    entry = None
    if is_stored:
        stored = await call_of(http).run(asked.cost, lambda: _to_store(asked.given))
        entry = Entry(id, caller_of(http).key, stored, asked.previous, is_background=bool(wire.background))
    return PreparedResponse(response_events, generation, entry)


async def conversation(store: ResponseStore, http: HttpRequest, wire: ResponsesRequest) -> Conversation:
    """Return the conversation of `wire`, including stored items of earlier responses. Raises ApiError."""
    caller = caller_of(http)
    previous = None
    if wire.previous_response_id is not None:
        previous = _previous(store, wire.previous_response_id, caller)
    earlier = [] if previous is None else [*previous.conversation(), *previous.output]
    cost = call_of(http).body_cost + sum(len(stored.json) for stored in earlier)
    offload = partial(call_of(http).run, cost)
    tools = await offload(lambda: read_tools(wire.tools or (), wire.tool_choice))
    ignored: list[str] = []
    read, wanted = await offload(lambda: _read_input(wire, ignored))
    there = store.items(wanted, caller) if wanted else {}
    given, items = await offload(lambda: _assembled(read, there, earlier))
    return Conversation(items, given, previous, tools, [*wire.left_undone(), *tools.left_out, *ignored], cost)


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
            f"Response {id} is {entry.status}: only completed responses can be continued",
            param="previous_response_id",
        )
    return entry


def request_of(loaded: LoadedModel, wire: ResponsesRequest, items: Sequence[Item], tools: Tools) -> GenerateRequest:
    """Convert `items` and the options of `wire` to a GenerateRequest. Raises InvalidRequest."""
    template = loaded.chat_template
    messages = with_joint_turns(with_one_head(messages_of(items, wire.instructions), template), template)
    return generate_request(wire, messages, tools)


async def _fits(
    call: Call, loaded: LoadedModel, wire: ResponsesRequest, asked: Conversation, items: Sequence[Item]
) -> bool:
    """Return True if the prompt of `items` leaves enough of the context for the answer."""
    request = await call.run(asked.cost, lambda: request_of(loaded, wire, items, asked.tools))
    try:
        with NAMES.spoken():
            assert isinstance(request.prompt, Chat), "it was made here"
            ids = await chat_ids(loaded, call, request.prompt)
    except ContextLengthExceeded:
        return False
    return len(ids) + (wire.max_output_tokens or 1) <= loaded.engine.model.max_model_len


def _read(stored: StoredItem) -> Item:
    return input_items.from_json(stored.json)


def _read_input(wire: ResponsesRequest, ignored: list[str]) -> tuple[list[Item | ItemReference], set[str]]:
    """Parse the field `input`. Return its items, and the ids that it references. Fields without effect are added to `ignored`."""
    if not wire.input and wire.previous_response_id is not None and isinstance(wire, CountRequest):
        return [], set()
    given = input_items.read(wire.input, ignored)
    return given, {item.id for item in given if isinstance(item, ItemReference)}


def _assembled(
    given: Sequence[Item | ItemReference], there: Mapping[str, StoredItem], earlier: Sequence[StoredItem]
) -> tuple[list[Item], list[Item]]:
    """Return the request's own items, and the items of the whole conversation. `there`: items to which references point."""
    found = _resolved(given, there)
    items = [*map(_read, earlier), *found]
    input_items.check_outputs(items)
    return found, items


def _to_store(given: Sequence[Item]) -> tuple[StoredItem, ...]:
    return tuple(StoredItem(item.id or "", encode(input_items.to_json(item))) for item in given)


def _resolved(given: Sequence[Item | ItemReference], there: Mapping[str, StoredItem]) -> list[Item]:
    """Replace each reference in `given` by its item from `there`. Raises InvalidRequest for an unknown reference."""
    found: list[Item] = []
    for number, item in enumerate(given):
        if not isinstance(item, ItemReference):
            found.append(item)
        elif item.id in there:
            found.append(_read(there[item.id]))
        else:
            raise InvalidRequest(f"Item with id '{item.id}' not found.", param=f"input[{number}].id")
    return found


# --- the core's request -------------------------------------------------------------------------------------------


NAMES: Final = FieldNames(
    {"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
)


def generate_request(wire: ResponsesRequest, messages: list[ChatMessage], tools: Tools) -> GenerateRequest:
    """Return a GenerateRequest with these messages and tools. Raises InvalidRequest if fields contradict each other."""
    with NAMES.spoken():
        chat = Chat(
            messages=messages,
            tools=tools.functions,
            tool_choice=tools.choice,
            parallel_tool_calls=wire.parallel_tool_calls is not False,
            template_kwargs=wire.chat_template_kwargs or {},
            processor_kwargs=wire.mm_processor_kwargs,
            allow_special_tokens=wire.allow_special_tokens,
            reasoning_effort=None if wire.reasoning is None else wire.reasoning.effort,
        )
    return GenerateRequest(
        prompt=chat,
        sampling=sampling_of(wire),
        shown=Shown(
            stop=wire.stop_strings,
            include_stop=bool(wire.include_stop_str_in_output),
            skip_special_tokens=wire.skip_special_tokens is not False,
            reasoning=wire.include_reasoning is not False,
            logprobs=wire.top_logprobs or 0 if wire.wants_logprobs else None,
        ),
        max_tokens=wire.max_output_tokens,
        constraint=_constraint(wire),
        thinking_token_budget=wire.thinking_token_budget,
        **wire.terms,
    )


def _constraint(wire: ResponsesRequest) -> OutputConstraint | None:
    """Return the output constraint, or None. Raises InvalidRequest if two fields define different constraints."""
    found: list[OutputConstraint] = []
    match None if wire.text is None else wire.text.format:
        case JsonObject(schema=schema):
            found.append(json_object("text.format") if schema is None else json_schema(schema, "text.format"))
        case FormatSchema(schema=schema):
            found.append(json_schema(schema, "text.format.schema"))
    return one_constraint(found, wire.constraints)


# --- truncation ---------------------------------------------------------------------------------------------------


def shortenings(items: Sequence[Item]) -> list[list[Item]]:
    """Return the possible truncations of `items`, from all items to the fewest."""
    lead = 0
    while lead < len(items) and _is_from(items[lead], "system", "developer"):
        lead += 1
    starts = [number for number in range(lead + 1, len(items)) if _is_from(items[number], "user")]
    return [list(items), *([*items[:lead], *items[start:]] for start in starts)]


async def longest(items: Sequence[Item], fits: Callable[[Sequence[Item]], Awaitable[bool]]) -> list[Item]:
    """Return the longest truncation of `items` for which `fits` returns True, or the shortest if none fits."""
    found = shortenings(items)
    if await fits(found[0]):
        return found[0]
    low, high = 1, len(found) - 1  # the place is between them, both included
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(found[middle]) else (middle + 1, high)
    return found[min(low, len(found) - 1)]


def _is_from(item: Item, *roles: str) -> bool:
    return isinstance(item, InputMessage) and item.role in roles
