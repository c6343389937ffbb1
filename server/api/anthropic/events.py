"""MessageFrames: a streamed answer as Anthropic's events.

message_start with the first token; for each block content_block_start, deltas, content_block_stop, and a ping behind the first
start; message_delta with why it stopped and what it cost; message_stop. Or an error, at any time, and nothing more. A call that
turns out broken comes again, whole, as text: the client has got it in part, and no stop_reason asks for it to be made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from orjson import dumps

from runtime.api import FinishReason, Output, TokenWriter
from server.api.anthropic.content import NOT_STOPPED, SIGNATURE, message, stop, usage
from server.api.anthropic.errors import error_body
from server.api.anthropic.history import tool_use_id
from server.generate.generation import Generation
from server.http.errors import Aborted, as_api_error
from server.http.schema import Json
from server.text.events import Event, Malformed, Reasoning, Text, ToolArguments, ToolCall

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
_HOLE = "\x00text\x00"


def frame(kind: str, **more: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + dumps({"type": kind, **more}) + b"\n\n"


class MessageFrames:
    """Frames of one streamed answer, choice 0 of `generation`. `context_was_short`: see `content.stop`."""

    def __init__(
        self,
        id: str,
        model: str,
        request_id: str,
        generation: Generation,
        *,
        context_was_short: bool,
        shows_thinking: bool,
    ) -> None:
        self._id = id
        self._model = model
        self._request_id = request_id
        self._generation = generation
        self._choice = generation.choices[0]
        self._context_was_short = context_was_short
        self._shows_thinking = shows_thinking
        self._started = False
        self._kind: str | None = None  # of the open block
        self._index = -1  # of the last block
        self._around = b"", b""  # what stands around the text of the open block's deltas

    def feed(self, outputs: Sequence[Output]) -> bytes:
        if len(outputs) == 1:
            return self._frame(outputs[0])
        return b"".join(map(self._frame, outputs))

    def writer(self, index: int, connection: Any) -> TokenWriter | None:
        """What goes on with the answer where it has begun as text: see `Choice.writer`."""
        return self._choice.writer(*self._around, connection) if self._kind == TEXT else None

    def _frame(self, output: Output) -> bytes:
        events = self._choice.events(output)
        if self._kind == TEXT and len(events) == 1 and self._choice.finish_reason is None:
            event = events[0]  # nearly always more of the same
            if isinstance(event, Text):
                return self._delta(event.text) if event.text else b""
        return b"".join(self._frames(events))

    def _frames(self, events: list[Event]) -> Iterator[bytes]:
        if self._choice.finish_reason == FinishReason.ABORT:
            raise Aborted
        if not self._started:
            self._started = True
            yield self._start()
        for event in events:
            yield from self._event(event)
        if self._choice.finish_reason is not None:
            yield from self._close()
            stopped = stop(self._choice, context_was_short=self._context_was_short)
            yield frame("message_delta", delta=stopped, usage=usage(self._generation))

    def _start(self) -> bytes:
        started = message(self._id, self._model, [], NOT_STOPPED, usage(self._generation))
        return frame("message_start", message=started)

    def _event(self, event: Event) -> Iterator[bytes]:
        match event:
            case Text(text) | Malformed(_, text):
                if text:
                    yield from self._say(TEXT, {"type": TEXT, "text": ""}, text)
            case Reasoning(text):
                block = {"type": THINKING, "thinking": "", "signature": ""}
                yield from self._say(THINKING, block, text if self._shows_thinking else "")
            case ToolCall(_, name, id):
                yield from self._close()
                yield from self._open(
                    TOOL_USE, {"type": TOOL_USE, "id": tool_use_id(id or ""), "name": name, "input": {}}
                )
            case ToolArguments(_, text):
                yield self._delta(text)

    def _say(self, kind: str, block: Json, text: str) -> Iterator[bytes]:
        if self._kind != kind:
            yield from self._close()
            yield from self._open(kind, block)
        if text:
            yield self._delta(text)

    def _open(self, kind: str, block: Json) -> Iterator[bytes]:
        self._kind = kind
        self._index += 1
        yield frame("content_block_start", index=self._index, content_block=block)
        if not self._index:
            yield frame("ping")
        delta = _DELTAS[kind]
        before, after = frame("content_block_delta", index=self._index, delta=delta).split(dumps(_HOLE))
        self._around = before, after

    def _delta(self, text: str) -> bytes:
        before, after = self._around
        return before + dumps(text) + after

    def _close(self) -> Iterator[bytes]:
        if self._kind is None:
            return
        if self._kind == THINKING:
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            yield frame("content_block_delta", index=self._index, delta=signed)
        yield frame("content_block_stop", index=self._index)
        self._kind = None

    def end(self) -> bytes:
        return frame("message_stop")

    def fail(self, error: Exception) -> bytes:
        return b"event: error\ndata: " + error_body(as_api_error(error, self._request_id), self._request_id) + b"\n\n"


_DELTAS: dict[str, Json] = {
    TEXT: {"type": "text_delta", "text": _HOLE},
    THINKING: {"type": "thinking_delta", "thinking": _HOLE},
    TOOL_USE: {"type": "input_json_delta", "partial_json": _HOLE},
}
