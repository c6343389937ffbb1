"""Route POST /invocations of SageMaker. A body with `messages` is a chat request, a body with `prompt` a completion request."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp, Message

from server.api.openai import chat, completions
from server.api.route import EVENTS, GENERATION_REFUSALS, JSON, route
from server.api.service import Service
from server.http.body import BYTES_PER_CHAR, joined, read_chunks
from server.http.call import call_of
from server.http.errors import InvalidRequest
from server.http.schema import Json, readable


class Invocation(Struct):
    """Body of /v1/chat/completions or /v1/completions."""

    messages: list[dict[str, Any]] | UnsetType = UNSET
    prompt: str | list[Any] | UnsetType = UNSET


class _Kind(Struct):
    """Fields that distinguish a chat request from a completion request. Their values are not decoded."""

    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET


_KIND = msgspec.json.Decoder(_Kind)


@route(
    "POST", "/invocations", "invoke", "Generation", "The chat or completion its body asks for, as SageMaker has it",
    {JSON: Json, EVENTS: Json}, Invocation, GENERATION_REFUSALS,
)  # fmt: skip
async def invoke(service: Service, http: Request) -> ASGIApp:
    service.lifecycle.require_model()
    chunks = await read_chunks(http, service.config.max_body_size)
    cost = sum(map(len, chunks)) // BYTES_PER_CHAR

    def looked_at() -> tuple[bytes, bool]:
        body = joined(chunks)
        return body, _is_chat(body)

    body, is_chat = await call_of(http).run(cost, looked_at)
    route = chat.create if is_chat else completions.create
    return await route.handler(service, _with_body(http, body))


def _is_chat(body: bytes) -> bool:
    """Return True if `body` is a chat request, False for a completion request. Raises InvalidRequest if it is neither."""
    try:
        kind = readable(_KIND.decode, body)
    except msgspec.ValidationError:
        return True  # no object: what is wrong with it is the chat's to say
    if kind.messages is UNSET and kind.prompt is UNSET:
        raise InvalidRequest("the body needs messages (chat) or prompt (completion)", param="messages")
    return kind.messages is not UNSET


def _with_body(http: Request, body: bytes) -> Request:
    """Return a request like `http` whose body, already read, can be read again."""
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await http.receive()

    return Request(http.scope, receive)
