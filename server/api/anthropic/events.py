"""Streamed response as Anthropic's events.

The order is: message_start with the first token; for each block content_block_start, deltas and content_block_stop, with a ping
after the first start; message_delta with the stop reason and usage; message_stop. An error may occur at any time and ends the
stream. If a tool call is malformed, its whole text is sent again as text: the client has received a part of it, and no
stop_reason requests its execution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.json import encode

from runtime.api import Output, TokenWriter
from server.api.anthropic import api_types
from server.api.anthropic.errors import error_body
from server.api.anthropic.history import tool_use_id
from server.api.frames import HOLE, AnswerFrames, around, check_not_aborted, named_event
from server.generate.generation import Generation
from server.text.events import Event, Malformed, Reasoning, Text, ToolArguments, ToolCallStart

_DELTAS: dict[type[Struct], Any] = {
    api_types.TextContent: api_types.TextDelta(HOLE),
    api_types.ThinkingContent: api_types.ThinkingDelta(HOLE),
    api_types.ToolUseContent: api_types.InputJsonDelta(HOLE),
}


class MessageFrames(AnswerFrames):
    """Converter of one streamed answer (choice 0 of `generation`) to events. `context_was_short`: see `Stopped.of`."""

    def __init__(
        self, id: str, model: str, request_id: str, generation: Generation, *, context_was_short: bool, shows_thinking: bool
    ) -> None:  # fmt: skip
        super().__init__(
            generation, request_id, lambda error: b"event: error\ndata: " + error_body(error, request_id) + b"\n\n"
        )
        self._id = id
        self._model = model
        self._choice = generation.choices[0]
        self._context_was_short = context_was_short
        self._shows_thinking = shows_thinking
        self._started = False
        self._kind: type[Struct] | None = None  # of the open block
        self._index = -1  # of the last block
        self._around = b"", b""  # what stands around the text of the open block's deltas

    def writer(self, index: int, connection: Any) -> TokenWriter | None:
        """Return a writer for the rest of the answer if the answer began as text, or None. See `Choice.writer`."""
        return self._choice.writer(*self._around, connection) if self._kind is api_types.TextContent else None

    def feed(self, outputs: Sequence[Output]) -> bytes:
        if len(outputs) == 1 and self._kind is api_types.TextContent:
            events = self._choice.events(outputs[0])
            if len(events) == 1 and self._choice.finish_reason is None and isinstance(events[0], Text):
                return self._delta(events[0].text) if events[0].text else b""  # nearly always more of the same
            return b"".join(self._frames_of(events))
        return super().feed(outputs)

    def _frames(self, output: Output) -> Iterator[bytes]:
        return self._frames_of(self._choice.events(output))

    def _frames_of(self, events: list[Event]) -> Iterator[bytes]:
        check_not_aborted(self._choice)
        if not self._started:
            self._started = True
            yield named_event(
                api_types.MessageStart(
                    api_types.AnthropicMessage.of(self._id, self._model, [], api_types.Stopped(None), self._generation)
                )
            )
        for event in events:
            yield from self._event(event)
        if self._choice.finish_reason is not None:
            yield from self._close()
            stopped = api_types.Stopped.of(self._choice, context_was_short=self._context_was_short)
            yield named_event(api_types.MessageDelta(stopped, api_types.MessageUsage.of(self._generation)))

    def _event(self, event: Event) -> Iterator[bytes]:
        match event:
            case Text(text) | Malformed(_, text):
                if text:
                    yield from self._say(api_types.TextContent(""), text)
            case Reasoning(text):
                yield from self._say(api_types.ThinkingContent("", ""), text if self._shows_thinking else "")
            case ToolCallStart(_, name, id):
                yield from self._close()
                yield from self._open(api_types.ToolUseContent(tool_use_id(id or ""), name, {}))
            case ToolArguments(_, text):
                yield self._delta(text)

    def _say(self, block: api_types.Content, text: str) -> Iterator[bytes]:
        if self._kind is not type(block):
            yield from self._close()
            yield from self._open(block)
        if text:
            yield self._delta(text)

    def _open(self, block: api_types.Content) -> Iterator[bytes]:
        self._kind = type(block)
        self._index += 1
        yield named_event(api_types.ContentBlockStart(self._index, block))
        if not self._index:
            yield named_event(api_types.Ping())
        self._around = around(named_event(api_types.ContentBlockDelta(self._index, _DELTAS[self._kind])))

    def _delta(self, text: str) -> bytes:
        before, after = self._around
        return before + encode(text) + after

    def _close(self) -> Iterator[bytes]:
        if self._kind is None:
            return
        if self._kind is api_types.ThinkingContent:
            yield named_event(api_types.ContentBlockDelta(self._index, api_types.SignatureDelta(api_types.SIGNATURE)))
        yield named_event(api_types.ContentBlockStop(self._index))
        self._kind = None

    def end(self) -> bytes:
        return named_event(api_types.MessageStop())
