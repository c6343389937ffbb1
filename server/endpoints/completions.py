"""POST /v1/completions: one or several prompts, as text or ids, and OpenAI's text completion shape around the answers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from server import admission, schema
from server.answer import answer, answer_id, generation_of
from server.frames import Json
from server.intake import completion_ids, read_request
from server.logprobs import Style, Writer, completion_writer
from server.middleware import arrival_s
from server.service import Service
from server.structured.wishes import forms_of
from server.text.events import Event, Text
from server.tokenizer import Tokenizer
from server.transcript import Transcript

DEFAULT_MAX_TOKENS = 16


class CompletionShape:
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    has_one_prompt = False

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, event: Event, logprobs: Json | None = None) -> Json:
        assert isinstance(event, Text), "nothing else is looked for"
        return self.last(index, event.text, None, None, logprobs)

    def whole(
        self,
        index: int,
        said: Transcript,
        finish_reason: str | None,
        stop_reason: str | int | None,
        logprobs: Json | None,
    ) -> Json:
        return self.last(index, said.text, finish_reason, stop_reason, logprobs)

    def last(
        self, index: int, text: str, finish_reason: str | None, stop_reason: str | int | None, logprobs: Json | None
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def logprobs_writer(self, tokenizer: Tokenizer, style: Style) -> Writer:
        return completion_writer(tokenizer, style)


SHAPE = CompletionShape()


async def create(service: Service, http: Request) -> ASGIApp:
    served = service.lifecycle.served()
    wire = await read_request(http, schema.COMPLETION, service.config)
    admission.check_model(wire.model, served.names)
    prompts = await completion_ids(served, service.offload, wire)
    generation = generation_of(
        service.config,
        served,
        wire,
        prompts,
        id=answer_id(http, SHAPE),
        arrival_s=arrival_s(http.scope),
        continues_prompt=True,
        max_tokens=wire.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        param="prompt",
        forms=await forms_of(served, wire),
    )
    return await answer(service, served, http, wire, generation, SHAPE)
