"""POST /v1/chat/completions: messages through the chat template to ids, and OpenAI's chat shape around the answer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server import admission, schema
from server.answer import answer
from server.frames import Json
from server.intake import chat_ids, read_request
from server.logprobs import Style, Writer, chat_writer
from server.service import Service
from server.tokenizer import Tokenizer


class ChatShape:
    continues_prompt = False
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_one_prompt = True

    def opening(self, index: int) -> Json:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, logprobs: Json | None = None) -> Json:
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}

    def last(
        self, index: int, text: str, finish_reason: str | None, stop_reason: str | int | None, logprobs: Json | None
    ) -> Json:
        return {
            "index": index,
            "delta": {"content": text} if text else {},
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def whole(
        self, index: int, text: str, finish_reason: str | None, stop_reason: str | int | None, logprobs: Json | None
    ) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def logprobs_writer(self, tokenizer: Tokenizer, style: Style) -> Writer:
        return chat_writer(tokenizer, style)


SHAPE = ChatShape()


async def create(service: Service, http: Request) -> ASGIApp:
    served = service.lifecycle.served()
    wire = await read_request(http, schema.CHAT, service.config)
    admission.check_model(wire.model, served.names)
    prompt_ids = await chat_ids(served, service.offload, wire.messages, wire)
    # The newer name wins; `schema` has refused two different values.
    wanted = wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens
    return await answer(
        service, served, http, wire, [prompt_ids], SHAPE, max_tokens=wanted, default_max_tokens=None, param="messages"
    )
