"""Compaction: shortens a conversation to its user messages and a summary that the model writes.

The client receives the summary as an item in this server's own encoding (`sealed`), so nothing is stored. The request is
rejected unless the conversation and the summary fit the context together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from msgspec import structs
from starlette.requests import Request as HttpRequest

from server.api.response_store import ResponseStore
from server.api.responses import input_items
from server.api.responses.api_types import CompactedResponse, CompactionItem, ResponseUsage
from server.api.responses.input_items import InputMessage, Item, new_id, seal
from server.api.responses.prepare import NAMES, conversation, request_of
from server.api.responses.request_types import CompactRequest
from server.api.service import Service
from server.generate.collect import collect_transcripts
from server.generate.start import start
from server.http.call import call_of, note_ignored
from server.http.errors import ContextLengthExceeded
from server.http.watch import ClientWatch
from server.models.model import LoadedModel

MIN_SUMMARY_TOKENS: Final = 64
MAX_SUMMARY_TOKENS: Final = 4096
INSTRUCTION: Final = (
    "Summarise this conversation for whoever goes on with it and has not read it: what the user wants, what was done and found "
    "out, what was decided, which files, names and numbers matter, and what remains to be done. Answer with the summary alone."
)


async def compacted(
    service: Service, store: ResponseStore, loaded: LoadedModel, http: HttpRequest, wire: CompactRequest
) -> CompactedResponse:
    """Return the compacted conversation. Raises ApiError, or ClientLeft if the client disconnects."""
    asked = await conversation(store, http, wire)
    question = InputMessage(role="user", content=INSTRUCTION)
    request = await call_of(http).run(
        asked.cost, lambda: request_of(loaded, wire, [*asked.items, question], asked.tools)
    )
    request = structs.replace(request, max_tokens=None, default_max_tokens=MAX_SUMMARY_TOKENS)
    id = new_id("resp_")
    with NAMES.spoken():
        generation, unread = await start(service.config, call_of(http), loaded, request, id=id)
    _check_room(generation.num_prompt_tokens, loaded.engine.model.max_model_len)
    note_ignored(http, [*asked.ignored, *map(NAMES.name_of, unread)], service.config)
    (transcript,) = await collect_transcripts(generation, ClientWatch(http.receive))
    said = await call_of(http).run(asked.cost, lambda: _said(asked.items))
    summary = CompactionItem(new_id("cmp_"), seal(transcript.text.strip()))
    return CompactedResponse(
        id=id, created_at=int(time.time()), output=[*said, summary], usage=ResponseUsage.of(generation)
    )


def _said(items: Sequence[Item]) -> list[Any]:
    return [input_items.to_json(item) for item in items if isinstance(item, InputMessage) and item.role == "user"]


def _check_room(num_prompt_tokens: int, max_model_len: int) -> None:
    room = max_model_len - num_prompt_tokens
    if room < MIN_SUMMARY_TOKENS:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens; the conversation leaves {room} for its summary, which "
            f"needs {MIN_SUMMARY_TOKENS}",
            param="input",
        )
