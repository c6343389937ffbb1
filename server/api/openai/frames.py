"""OpenAI's responses: whole bodies, and chunks as server-sent events.

A ResponseShape formats one choice of a route; ids, usage, order and framing are shared. The chunks of a choice are: an opening
chunk (in chats the role), text, and the last text with finish_reason and stop_reason. The usage chunk follows all choices, if
requested. The constant part of a chunk is encoded once per choice. A token then costs only the JSON encoding of its text and one
join.

If an answer consists of events (calls, reasoning), each event and finish_reason have chunks of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.json import encode
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.api import Output, TokenWriter
from server.api.frames import HOLE, around, event
from server.api.openai.api_types import ChatChoice, ChatChunkChoice, ChatCompletion, TextChoice, TextCompletion, Usage
from server.api.openai.request_types import GenerationRequest
from server.api.openai.shapes import ResponseShape
from server.api.service import Service
from server.generate.collect import collect_transcripts
from server.generate.generation import Choice, Generation, PromptChoice
from server.generate.logprobs import PromptLogprobs, prompt_table
from server.generate.request import GenerateRequest
from server.generate.start import start
from server.generate.transcript import Transcript
from server.http.answers import json_response, long_json_response
from server.http.call import call_of, note_ignored
from server.http.errors import as_api_error
from server.http.sse import EventStream, Frames
from server.http.watch import ClientWatch, while_waited_for
from server.models.model import LoadedModel
from server.text.events import Text


@dataclass(frozen=True, slots=True)
class Envelope:
    """Values that are repeated in every body and chunk of a response."""

    id: str
    created: int
    model: str
    fingerprint: str
    shape: ResponseShape

    def body(self, generation: Generation, transcripts: Sequence[Transcript]) -> ChatCompletion | TextCompletion:
        """Return the whole response of a request that does not stream. `transcripts`: one per choice."""
        choices = [
            self._whole(generation, index, transcripts[index], place) for place, index in enumerate(generation.best)
        ]
        answer: ChatCompletion | TextCompletion = self.shape.answer(
            id=self.id, created=self.created, model=self.model, choices=choices,
            usage=Usage.of(generation), system_fingerprint=self.fingerprint,
        )  # fmt: skip
        if isinstance(answer, ChatCompletion):
            answer.prompt_logprobs = self._of_prompt(generation, generation.best[0])
        return answer

    def _whole(self, generation: Generation, index: int, transcript: Transcript, place: int) -> ChatChoice | TextChoice:
        """Return choice `index` as the response's choice number `place`."""
        choice, options = generation.choices[index], generation.options
        logprobs = None
        if options.logprobs is not None:
            write = self.shape.logprobs_writer(generation.tokenizer, generation.style(index))
            logprobs = write(choice.take_logprobs())
        shown = self.shape.whole(place, choice, transcript, logprobs)
        if options.token_ids:
            shown.prompt_token_ids = [*generation.requests[index].prompt_ids]
            shown.token_ids = choice.take_token_ids()
        if isinstance(shown, TextChoice):
            shown.prompt_logprobs = self._of_prompt(generation, index)
        return shown

    def _of_prompt(self, generation: Generation, index: int) -> PromptLogprobs | UnsetType:
        """Return the prompt log-probabilities of choice `index`, or UNSET if the client did not request them."""
        choice, options = generation.choices[index], generation.options
        if options.prompt_logprobs is None or not isinstance(choice, PromptChoice):
            return UNSET
        return prompt_table(
            generation.tokenizer, choice.prompt_logprobs, options.prompt_logprobs, as_ids=options.tokens_as_ids
        )

    def chunk(self, choices: Sequence[ChatChunkChoice | TextChoice], **more: Any) -> bytes:
        return event(self.shape.chunk(id=self.id, created=self.created, model=self.model, choices=choices, **more))


class ChunkFrames(Frames[Sequence[Output]]):
    """Converter of one streamed response to chunks. With `include_usage`, other chunks have a null usage. With `continuous_usage`,
    they have the usage so far.

    If token ids are requested, the first chunk of a choice contains its prompt's ids, and each chunk its new ids."""

    def __init__(
        self, envelope: Envelope, generation: Generation, *, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        self._envelope = envelope
        self._generation = generation
        self._choices = generation.choices
        self._include_usage = include_usage
        self._null_usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self._continuous_usage = continuous_usage
        # A chunk that says more than its text is made anew each time.
        self._plain = not continuous_usage and not generation.options.token_ids
        self._around: dict[int, tuple[bytes, bytes]] = {}  # index: the constant bytes before and after a text
        # Those that have begun, of which nothing is said but text: nearly all.
        self._plain_choices: dict[int, tuple[Choice, bytes, bytes]] = {}
        self._told_prompt: set[int] = set()
        self._logprob_writers = [
            None
            if generation.options.logprobs is None
            else envelope.shape.logprobs_writer(generation.tokenizer, generation.style(index))
            for index in range(len(generation.choices))
        ]

    def feed(self, outputs: Sequence[Output]) -> bytes:
        if len(outputs) == 1:
            output = outputs[0]
            known = self._plain_choices.get(output.index)
            if known is None:
                return self._frame(output)
            choice, before, after = known
            text = choice.feed(output)
            if choice.finish_reason is not None:
                return self._last(output.index, choice, text, None)
            return before + encode(text) + after if text else b""
        return b"".join(map(self._frame, outputs))

    def writer(self, index: int, connection: Any) -> TokenWriter | None:
        """Return a writer for the rest of choice `index` if its chunks contain only text, or None. See `Choice.writer`."""
        known = self._plain_choices.get(index)
        if known is None:
            return None
        choice, before, after = known
        return choice.writer(before, after, connection)

    def _frame(self, output: Output) -> bytes:
        if self._generation.reads_events:
            return self._frames_of_events(output)
        index = output.index
        choice = self._choices[index]
        text = choice.feed(output)
        around = self._around.get(index)
        if around is None:
            opening = self._opening(index)
            around = self._around[index]
        else:
            opening = b""
        logprobs = self._logprobs(index, choice)
        if choice.finish_reason is not None:
            return opening + self._last(index, choice, text, logprobs)
        if logprobs is not None or not self._plain:
            return opening + self._chunk(index, self._envelope.shape.delta(index, Text(text), logprobs))
        return opening + around[0] + encode(text) + around[1] if text else opening

    def _frames_of_events(self, output: Output) -> bytes:
        index = output.index
        choice = self._choices[index]
        events = choice.events(output)
        frames = [b"" if index in self._around else self._opening(index)]
        logprobs = self._logprobs(index, choice)
        is_last = choice.finish_reason is not None
        if not events and not is_last and (logprobs is not None or not self._plain):
            events = [Text("")]  # tokens of which nothing can be transcript yet have ids and log-probabilities
        before, after = self._around[index]
        for each in events:
            if isinstance(each, Text) and logprobs is None and self._plain:
                frames.append(before + encode(each.text) + after)
            else:
                frames.append(self._chunk(index, self._envelope.shape.delta(index, each, logprobs)))
            logprobs = None
        if is_last:
            frames.append(self._last(index, choice, "", logprobs))
        return b"".join(frames)

    def _logprobs(self, index: int, choice: Choice) -> Any:
        write = self._logprob_writers[index]
        return None if write is None or not (entries := choice.take_logprobs()) else write(entries)

    def _opening(self, index: int) -> bytes:
        shape, envelope = self._envelope.shape, self._envelope
        before, after = self._around[index] = around(
            envelope.chunk([shape.delta(index, Text(HOLE))], **self._null_usage)
        )
        if self._plain and self._logprob_writers[index] is None and not self._generation.reads_events:
            self._plain_choices[index] = self._choices[index], before, after
        opening = shape.opening(index)
        return b"" if opening is None else self._chunk(index, opening, is_opening=True)

    def _chunk(
        self, index: int, shown: ChatChunkChoice | TextChoice, *, is_opening: bool = False, **more: Any
    ) -> bytes:
        if self._generation.options.token_ids:
            if index not in self._told_prompt:
                self._told_prompt.add(index)
                shown.prompt_token_ids = [*self._generation.requests[index].prompt_ids]
            if not is_opening:
                shown.token_ids = self._choices[index].take_token_ids()
        so_far = {"usage": Usage.of(self._generation)} if self._continuous_usage else self._null_usage
        return self._envelope.chunk([shown], **{**so_far, **more})

    def _last(self, index: int, choice: Choice, text: str, logprobs: Any) -> bytes:
        more: dict[str, Any] = {} if self._include_usage else {"system_fingerprint": self._envelope.fingerprint}
        return self._chunk(index, self._envelope.shape.last(index, choice, text, logprobs), **more)

    def end(self) -> bytes:
        if not self._include_usage:
            return b""
        return self._envelope.chunk([], usage=Usage.of(self._generation), system_fingerprint=self._envelope.fingerprint)

    def fail(self, error: Exception) -> bytes:
        return b"data: " + as_api_error(error, self._envelope.id).body() + b"\n\n"


# --- the answer of a route --------------------------------------------------------------------------------------------


async def answer(
    service: Service,
    loaded: LoadedModel,
    http: HttpRequest,
    wire: GenerationRequest,
    request: GenerateRequest,
    shape: ResponseShape,
) -> ASGIApp:
    """Run `request`, converted from `wire`, and respond. Raises ApiError, or ClientLeft if the client disconnects."""
    call = call_of(http)
    id = shape.id_prefix + call.id
    generation, ignored = await while_waited_for(http.receive, start(service.config, call, loaded, request, id=id))
    note_ignored(http, ignored, service.config)
    envelope = Envelope(id, int(time.time()), loaded.name, loaded.fingerprint, shape)
    if wire.stream:
        options = wire.stream_options
        frames = ChunkFrames(
            envelope,
            generation,
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )
        return EventStream(generation.open, frames, ping_interval_s=service.config.ping_interval)
    transcript = await collect_transcripts(generation, ClientWatch(http.receive))
    if not generation.rendering_chars:
        return json_response(envelope.body(generation, transcript))

    def response() -> Response:
        body = envelope.body(generation, transcript)
        generation.release()
        return long_json_response(body)

    return await call_of(http).run(generation.rendering_chars, response)
