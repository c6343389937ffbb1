"""Handlers of POST /completion and /infill, GET /props and /slots."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.api import Output, TokenStream
from server.api.llamacpp import api_types, request_types
from server.api.llamacpp.frames import ContentFrames, last, selected
from server.api.llamacpp.prepare import INFILL_NAMES, NAMES, Prepared, of_completion, of_infill
from server.api.llamacpp.state import props, slots
from server.api.route import EVENTS, GENERATION_REFUSALS, JSON, Route, route
from server.api.service import Service
from server.generate.collect import collect
from server.generate.generation import Generation
from server.generate.start import start
from server.generate.timings import Timings
from server.http.answers import json_response, long_json_response
from server.http.body import read_query, read_request
from server.http.call import call_of, note_ignored, off_loop
from server.http.errors import FieldNames, Unavailable
from server.http.sse import EventStream
from server.http.watch import ClientWatch
from server.models import lookup
from server.models.model import LoadedModel

RETRY_SLOT_S = 1


async def complete(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.COMPLETION, service.config)
    loaded = await lookup.named(call_of(http), loaded, given.model)
    prepared = await off_loop(http, lambda: of_completion(given))
    return await _answer(service, loaded, http, given, prepared, NAMES, is_list=given.is_list)


COMPLETION, COMPLETIONS = (
    Route(
        complete, "POST", path, id, "llama.cpp", "Continue a prompt, as llama.cpp has it; with `stream`, as server-sent events",
        {JSON: api_types.LlamaCompletion | list[api_types.LlamaCompletion], EVENTS: api_types.LlamaCompletion},
        request_types.LlamaCompletionRequest, GENERATION_REFUSALS,
    )
    for path, id in (("/completion", "llamaCompletion"), ("/completions", "llamaCompletions"))
)  # fmt: skip


@route(
    "POST", "/infill", "llamaInfill", "llama.cpp", "Fill in what stands between two texts, as llama.cpp has it",
    {JSON: api_types.LlamaCompletion | list[api_types.LlamaCompletion], EVENTS: api_types.LlamaCompletion},
    request_types.LlamaInfillRequest, GENERATION_REFUSALS,
)  # fmt: skip
async def infill(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.INFILL, service.config)
    loaded = await lookup.named(call_of(http), loaded, given.model)
    return await _answer(service, loaded, http, given, of_infill(given), INFILL_NAMES, is_list=False)


@route("GET", "/props", "llamaProps", "llama.cpp", "What the server is", {JSON: api_types.LlamaProps}, None, (503,))
async def read_props(service: Service, http: Request) -> ASGIApp:
    return json_response(props(service.lifecycle.require_model(), service.config))


@route(
    "GET", "/slots", "llamaSlots", "llama.cpp", "The sequences that may run at a time", {JSON: list[api_types.LlamaSlot]},
    None, (400, 503), query=request_types.SlotsQuery,
)  # fmt: skip
async def read_slots(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    found, query = slots(loaded), read_query(http, request_types.SlotsQuery, service.config)
    if query.fail_on_no_slot and all(slot.is_processing for slot in found):
        raise Unavailable("no slot is free; retry later", retry_after_s=RETRY_SLOT_S)
    return json_response(found)


# --- answers ------------------------------------------------------------------------------------------------------


async def _answer(
    service: Service,
    loaded: LoadedModel,
    http: Request,
    given: request_types.LlamaRequest,
    prepared: Prepared,
    names: FieldNames,
    *,
    is_list: bool,
) -> ASGIApp:
    call = call_of(http)
    id = call.id
    note_ignored(http, prepared.ignored, service.config)
    with names.spoken():
        generation, _ = await start(service.config, call, loaded, prepared.request, id=f"llama-{id}")
    timings = [Timings(call.arrival_s) for _ in generation.requests]

    def open_stream() -> TokenStream:
        for each in timings:
            each.begin()
        return generation.open()

    stop = prepared.request.shown.stop
    if given.stream:
        frames = ContentFrames(
            loaded, id, generation, timings, stop,
            with_timings=bool(given.timings_per_token), fields=given.response_fields,
        )  # fmt: skip
        return EventStream(open_stream, frames, ping_interval_s=service.config.ping_interval, done=b"")
    contents = await _collect(http, generation, timings)
    num_tokens = sum(len(request.prompt_ids) for request in generation.requests)

    def response() -> Response:
        found = [
            selected(
                last(
                    loaded, generation, index, timings[index], stop, content=content,
                    prompt=loaded.tokenizer.decode(generation.requests[index].prompt_ids, skip_special_tokens=False),
                    has_new_line="\n" in content, stream=False,
                ),
                given.response_fields,
            )
            for index, content in enumerate(contents)
        ]  # fmt: skip
        generation.release()
        return long_json_response(found if is_list or len(found) > 1 else found[0])

    return await call_of(http).run(4 * num_tokens + generation.rendering_chars, response)


async def _collect(http: Request, generation: Generation, timings: list[Timings]) -> list[str]:
    """Run the generation to its end. Return the text of every choice."""
    pieces: list[list[str]] = [[] for _ in generation.requests]

    def feed(output: Output) -> None:
        timings[output.index].note()
        pieces[output.index].append(generation.choices[output.index].feed(output))

    for each in timings:
        each.begin()
    await collect(generation, ClientWatch(http.receive), feed)
    return ["".join(text) for text in pieces]
