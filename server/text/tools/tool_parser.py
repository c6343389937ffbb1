"""Base of all tool parsers: emits text up to a marker, announces a call, and streams the call's arguments.

- A call is announced (ToolCallStart) once its name is certain and its arguments begin. If the call is invalid before that, all
  its characters become Text. If it is invalid or cut off later, it ends with Malformed, which contains the call's whole text.
- White space between text and a call, between calls and after the last call belongs to the format and is dropped. Without a
  call, the text is unchanged.
- No text is parsed twice. Text that is held back is a prefix of a marker or of a call.

Most markers are special tokens: the text must be decoded with them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from server.text.events import Event, Malformed, Text, ToolArguments, ToolCallStart, joined
from server.text.json_stream import json_string, json_value, whole_json
from server.text.markers import Markers, Parse
from server.text.parsing import ParsingCodec
from server.text.tools.call_format import CallFormat, Channels, Writer
from server.text.tools.schemas import Schema, as_schema

Tools = Sequence[Mapping[str, Any]]


class ToolParser(ParsingCodec):
    """Base class of the parsers of tool call formats. `tools`: the request's tools in OpenAI's format. Their names identify
    calls; their schemas provide argument types if the format has none."""

    starts: ClassVar[Markers]  # what begins a call, or a list of them
    ends: ClassVar[Markers]  # what ends one that is broken
    inner: ClassVar[tuple[str, ...]] = ()  # further strings of the format that may be special tokens
    stops: ClassVar[tuple[str, ...]] = ()  # tokens behind which the model waits for somebody else
    reasons: ClassVar[bool] = False  # the format has reasoning too: no ReasoningCodec stands before it
    call_formats: ClassVar[tuple[CallFormat, ...]]  # how calls are written; the first that fits the tokenizer
    bare: ClassVar[str] = ""  # characters with which a call without a marker may begin, at the start of the text
    channels: ClassVar[Channels | None] = None
    efforts: ClassVar[Mapping[str, str] | None] = None  # reasoning_effort in the model's words; None: any goes

    def __init__(self, tools: Tools = ()) -> None:
        self._parameters = dict(map(_parameters, tools))
        self._space: list[str] = []  # at the end of the text so far
        self._num_calls = 0
        self._open = False  # a call is announced and not over
        self._behind_call = False  # no text since a call
        super().__init__()

    @classmethod
    def strings(cls) -> frozenset[str]:
        """Return the markers. The detokenizer must keep them in the text even if they are special tokens."""
        return frozenset((*cls.starts.strings, *cls.ends.strings, *cls.inner))

    @classmethod
    def arguments(cls, write: Writer, schema: Schema) -> str:
        """Return the grammar expression of a call's arguments. `schema`: JSON schema of the arguments."""
        return write.json(schema)

    @staticmethod
    def new_id() -> str:
        """Return a new id, in a form that the chat template accepts, for a call that the model wrote without an id."""
        return f"call_{secrets.token_hex(12)}"

    def _at_end(self) -> None:
        if self._space and not self._behind_call:
            self._events.append(Text("".join(self._space)))

    def _drain(self) -> list[Event]:
        events = super()._drain()
        return list(joined(events)) if len(events) > 1 else events

    # --- what a parser does --------------------------------------------------------------------------------------

    def _parse(self) -> Parse[None]:
        if self.bare:
            self.source.record()
            char = yield from self.source.space()
            if char and char in self.bare:
                yield from self._call("")
            else:
                self._emit_text(self.source.recorded())
        while marker := (yield from self.source.until(self.starts, self._emit_text)):
            self.source.record(marker)
            yield from self._call(marker)
            self.source.recorded()

    def _call(self, marker: str) -> Parse[None]:
        """Parse the text after the start marker `marker`; "" means a bare call at the start. Text since the marker is recorded."""
        raise NotImplementedError

    # --- what it does it with ------------------------------------------------------------------------------------

    def _emit_text(self, text: str) -> None:
        shown = text.rstrip()
        if shown:
            self._events.append(Text("".join(self._space) + shown))
            self._space, self._behind_call = [], False
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def _is_tool(self, name: str) -> bool:
        """Return True if the request has a tool `name`. Formats without markers need this to recognise a call."""
        return name in self._parameters

    def _begin(self, name: str, id: str | None = None) -> None:
        self._space = []
        self._open = True
        self._events.append(ToolCallStart(self._num_calls, name, id))

    def _emit_arguments(self, text: str) -> None:
        self._events.append(ToolArguments(self._num_calls, text))

    def _end(self) -> None:
        """End the call and start a new record."""
        self._num_calls += 1
        self._open, self._behind_call = False, True
        self.source.record()

    def _fail(self) -> Parse[None]:
        """Handle an invalid call. If it was announced, skip text up to an end marker. Emit the call as Malformed or Text."""
        if self._open:
            yield from self.source.until(self.ends, ignore)
        self._break_off()

    def _break_off(self) -> None:
        """Emit the recorded text: as Malformed if the call was announced, otherwise as Text."""
        if not self._open:
            self._emit_text(self.source.recorded())
            return
        self._events.append(Malformed(self._num_calls, self.source.recorded()))
        self._end()

    def _close(self, *ends: str) -> Parse[str]:
        """Consume and return the first of `ends` that follows. If none follows, emit white space as text and return ""."""
        self.source.record()
        yield from self.source.space()
        for end in ends:
            if (yield from self.source.literal(end)):
                return end
        self._emit_text(self.source.recorded())
        return ""

    def _arguments_of(self, name: str, id: str | None = None) -> Parse[bool]:
        """Parse a call's arguments. Announce call `name` when they begin, and stream them. Return False if they are invalid."""
        return self._arguments(partial(self._begin, name, id), self._emit_arguments)

    def _arguments(self, begin: Callable[[], object], emit: Callable[[str], object]) -> Parse[bool]:
        """Parse arguments: an object, an object in a string, or null. Call `begin`, then `emit` with JSON. Return False if
        invalid."""
        char = yield from self.source.space()
        if char == "{":
            begin()
            return (yield from json_value(self.source, emit))
        if char == '"':
            text = yield from json_string(self.source)
            inner = whole_json(text.strip()) if text is not None else None
            if inner is None or not inner.startswith("{"):
                return False
        elif (yield from self.source.literal("null")):
            inner = "{}"
        else:
            return False
        begin()
        emit(inner)
        return True


def _parameters(tool: Mapping[str, Any]) -> tuple[str, Schema]:
    function = tool.get("function", tool)
    return str(function.get("name", "")), as_schema(function.get("parameters") or function.get("input_schema"))


def ignore(text: str) -> None:
    """Ignore `text`. Used as `emit` for syntax without content."""
