"""Answers of /api/chat and /api/generate, whole or as JSON lines, and errors in Ollama's format.

A stream has one object per piece of text or reasoning, and one per complete tool call. The last object has the reason and
durations. An error ends the stream early. A malformed call is sent as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Protocol

from msgspec import UNSET
from msgspec.json import encode

from runtime.api import FinishReason, Output
from server.api.frames import AnswerFrames, check_not_aborted, encoded
from server.api.ollama.api_types import (
    OllamaAnswer,
    OllamaCalledFunction,
    OllamaError,
    OllamaMessage,
    OllamaToolCall,
)
from server.generate.generation import Generation
from server.generate.logprobs import Style, chat_writer
from server.generate.timings import Timings
from server.generate.transcript import Transcript, TranscriptCall
from server.http.errors import ApiError
from server.text.events import Event, Malformed, Reasoning, Text, ToolArguments, ToolCallStart

NS = 1_000_000_000


class Shape(Protocol):
    """Builder of an answer's objects. The keys of text, reasoning and calls differ between chats and completions."""

    def piece(
        self, model: str, text: str, *, thinking: str = "", calls: Sequence[TranscriptCall] = ()
    ) -> OllamaAnswer: ...


class ChatShape:
    def __init__(self) -> None:
        self._num_calls = 0

    def piece(self, model: str, text: str, *, thinking: str = "", calls: Sequence[TranscriptCall] = ()) -> OllamaAnswer:
        called = list(map(self._call, calls)) or UNSET
        message = OllamaMessage(content=text, thinking=thinking or UNSET, tool_calls=called)
        return OllamaAnswer(model=model, created_at=_now(), message=message)

    def _call(self, call: TranscriptCall) -> OllamaToolCall:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        # Checked as it was written, so it need not be read again.
        return OllamaToolCall(call.id, OllamaCalledFunction(number, call.name, encoded(call.arguments)))


class GenerateShape:
    def piece(self, model: str, text: str, *, thinking: str = "", calls: Sequence[TranscriptCall] = ()) -> OllamaAnswer:
        assert not calls, "there are no tools"
        return OllamaAnswer(model=model, created_at=_now(), response=text, thinking=thinking or UNSET)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def whole(model: str, shape: Shape, generation: Generation, transcript: Transcript, timings: Timings) -> OllamaAnswer:
    """Return the whole answer of a request that does not stream. `model`: model name that the client sent."""
    answer = shape.piece(model, transcript.text, thinking=transcript.reasoning, calls=transcript.calls)
    if generation.options.logprobs is not None:
        answer.logprobs = chat_writer(generation.tokenizer, Style())(generation.choices[0].take_logprobs()).content
    return _ended(answer, generation, timings)


def _ended(answer: OllamaAnswer, generation: Generation, timings: Timings) -> OllamaAnswer:
    """Add the final fields to `answer`: finish reason, token counts and durations."""
    answer.done = True
    answer.done_reason = "length" if generation.choices[0].finish_reason == FinishReason.LENGTH else "stop"
    answer.total_duration = _ns(timings.total_s)
    answer.load_duration = _ns(timings.preparing_s)
    answer.prompt_eval_count = generation.num_prompt_tokens
    answer.prompt_eval_duration = _ns(timings.prompt_s)
    answer.eval_count = generation.num_completion_tokens
    answer.eval_duration = _ns(timings.answer_s)
    return answer


def _ns(seconds: float) -> int:
    """Convert seconds to ns, at least 1, because clients divide by durations."""
    return max(1, round(seconds * NS))


class LineFrames(AnswerFrames):
    """Converter of one streamed answer (choice 0 of `generation`) to JSON lines."""

    def __init__(self, model: str, request_id: str, shape: Shape, generation: Generation, timings: Timings) -> None:
        super().__init__(generation, request_id, lambda error: error_body(error) + b"\n")
        self._model = model
        self._shape = shape
        self._choice = generation.choices[0]
        self._timings = timings
        wants_logprobs = generation.options.logprobs is not None
        self._write_logprobs = chat_writer(generation.tokenizer, Style()) if wants_logprobs else None
        self._call: tuple[ToolCallStart, list[str]] | None = None  # that has begun, and its arguments so far

    def feed(self, outputs: Sequence[Output]) -> bytes:
        self._timings.note()
        return super().feed(outputs)

    def _frames(self, output: Output) -> Iterator[bytes]:
        choice = self._choice
        events = choice.events(output)
        check_not_aborted(choice)
        pieces = [piece for event in events for piece in self._pieces(event)]
        if choice.finish_reason is not None:
            pieces += self._whole_call()
        if self._write_logprobs is not None and (entries := choice.take_logprobs()):
            pieces = pieces or [self._piece("")]
            pieces[0].logprobs = self._write_logprobs(entries).content
        if choice.finish_reason is not None:
            pieces.append(_ended(self._piece(""), self._generation, self._timings))
        for piece in pieces:
            yield encode(piece) + b"\n"

    def _piece(self, text: str, *, thinking: str = "", calls: Sequence[TranscriptCall] = ()) -> OllamaAnswer:
        return self._shape.piece(self._model, text, thinking=thinking, calls=calls)

    def _pieces(self, event: Event) -> Iterator[OllamaAnswer]:
        match event:
            case ToolArguments(_, text) if self._call is not None:
                self._call[1].append(text)
            case Malformed(_, text):
                self._call = None
                yield self._piece(text)
            case ToolCallStart():
                yield from self._whole_call()
                self._call = event, []
            case Reasoning(text):
                yield from self._whole_call()
                yield self._piece("", thinking=text)
            case Text(text) if text:
                yield from self._whole_call()
                yield self._piece(text)

    def _whole_call(self) -> list[OllamaAnswer]:
        if self._call is None:
            return []
        (begun, arguments), self._call = self._call, None
        return [self._piece("", calls=[TranscriptCall(begun.id or "", begun.name, "".join(arguments))])]


# --- errors -------------------------------------------------------------------------------------------------------


def error_body(error: ApiError) -> bytes:
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return encode(OllamaError(message))


class OllamaErrors:
    """Error format of Ollama's routes. HTTP statuses are the same as in the other APIs."""

    def body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error)

    def headers(self, request_id: str) -> tuple[tuple[bytes, bytes], ...]:
        return ()
