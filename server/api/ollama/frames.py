"""LineFrames: a streamed answer as Ollama's JSON lines.

An object for each piece of text or reasoning, one for each call, when it is whole; the last says why it ended and how long it
took. Or an error, at any time, and nothing more. A call that turns out broken is text: nothing of it was out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orjson import dumps

from runtime.api import FinishReason, Output
from server.api.ollama.answers import Shape, ending, head, logprobs_writer
from server.api.ollama.errors import error_body
from server.generate.generation import Generation
from server.generate.timings import Timings
from server.generate.transcript import Call
from server.http.errors import Aborted, as_api_error
from server.http.schema import Json
from server.text.events import Event, Malformed, Reasoning, Text, ToolArguments, ToolCall


class LineFrames:
    """Frames of one streamed answer, choice 0 of `generation`."""

    def __init__(self, model: str, request_id: str, shape: Shape, generation: Generation, timings: Timings) -> None:
        self._model = model
        self._request_id = request_id
        self._shape = shape
        self._generation = generation
        self._choice = generation.choices[0]
        self._timings = timings
        self._write_logprobs = logprobs_writer(generation)
        self._call: tuple[ToolCall, list[str]] | None = None  # that has begun, and its arguments so far

    def feed(self, outputs: Sequence[Output]) -> bytes:
        self._timings.note()
        return b"".join(line for output in outputs for line in self._lines(output))

    def _lines(self, output: Output) -> Iterator[bytes]:
        choice = self._choice
        events = choice.events(output)
        if choice.finish_reason == FinishReason.ABORT:
            raise Aborted
        pieces = [piece for event in events for piece in self._pieces(event)]
        if choice.finish_reason is not None:
            pieces += self._whole_call()
        logprobs: Json = {}
        if self._write_logprobs is not None and (entries := choice.take_logprobs()):
            logprobs = {"logprobs": self._write_logprobs(entries)["content"]}
            pieces = pieces or [self._shape.piece("")]
        for piece in pieces:
            yield self._line({**piece, **logprobs, "done": False})
            logprobs = {}
        if choice.finish_reason is not None:
            yield self._line({**self._shape.piece(""), **ending(self._generation, self._timings)})

    def _line(self, rest: Json) -> bytes:
        return dumps({**head(self._model), **rest}) + b"\n"

    def _pieces(self, event: Event) -> Iterator[Json]:
        match event:
            case ToolArguments(_, text) if self._call is not None:
                self._call[1].append(text)
            case Malformed(_, text):
                self._call = None
                yield self._shape.piece(text)
            case ToolCall():
                yield from self._whole_call()
                self._call = event, []
            case Reasoning(text):
                yield from self._whole_call()
                yield self._shape.piece("", thinking=text)
            case Text(text) if text:
                yield from self._whole_call()
                yield self._shape.piece(text)

    def _whole_call(self) -> list[Json]:
        if self._call is None:
            return []
        (begun, arguments), self._call = self._call, None
        return [self._shape.piece("", calls=[Call(begun.id or "", begun.name, "".join(arguments))])]

    def end(self) -> bytes:
        return b""

    def fail(self, error: Exception) -> bytes:
        return error_body(as_api_error(error, self._request_id)) + b"\n"
