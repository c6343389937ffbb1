"""Grammar of a chat's answer: tool calls in the model's own format, with arguments that match their schemas, and optionally text.

Tool parsers (`text/tools/`) define the formats as CallFormat objects. This module converts them to a Lark grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from server.generate.structured.grammar import MAX_CHARS, GrammarError, Regex, Rules, check_length, check_schema
from server.generate.structured.rules import COMBINING, RuleWriter
from server.http.errors import clip
from server.models.tokenizer import Tokenizer
from server.text.tools.registry import named
from server.text.tools.schemas import Schema
from server.text.tools.tool_parser import ToolParser

# Of objects that may hold what is not listed.
_OPEN_ENDED = COMBINING | {"additionalProperties", "patternProperties", "unevaluatedProperties"}
_STRING: Schema = {"type": "string"}


class FunctionRule(Struct, frozen=True):
    """Function that the answer may call. `schema`: JSON schema of its arguments object. `input`: grammar of the argument
    `input`, for custom tools."""

    name: str
    schema: Any
    input: Regex | Rules | None = None


class ChatGrammar(Struct, frozen=True, tag=True):
    """Grammar of a chat's answer. `functions`: functions that may be called. `must_call`: the answer must consist of calls.
    `several`: more than one call is allowed. `answer`: grammar of an answer without calls, None for any text."""

    tool_parser: str
    functions: tuple[FunctionRule, ...]
    must_call: bool
    several: bool
    answer: Any = None  # a Grammar

    def source(self, tokenizer: Tokenizer) -> str:
        check_length("the tools", json.dumps([function.schema for function in self.functions]), MAX_CHARS)
        tool_parser = named(self.tool_parser)
        writer = RuleWriter(tokenizer)
        try:
            calls = _Calls(writer, tool_parser, self.functions, several=self.several)
            start = self._channels(calls, writer) if tool_parser.channels else self._text(calls, writer, tool_parser)
        except GrammarError:
            raise
        except ValueError as error:
            raise GrammarError(str(error)) from None
        others = [] if self.answer is None else _named("answer", self.answer.source(tokenizer))
        return json.dumps({"grammars": [{"lark_grammar": writer.grammar(start)}, *writer.others, *others]})

    def _text(self, calls: _Calls, writer: RuleWriter, tool_parser: type[ToolParser]) -> str:
        if self.must_call:
            return calls.whole()
        if self.answer is not None:
            return f"({calls.whole()}) | @answer"
        if calls.trigger is None:
            return f"({calls.whole()}) | {writer.free(tool_parser.starts.strings, not_first=tool_parser.bare)}?"
        others = [string for string in tool_parser.starts.strings if string != calls.trigger]
        head = writer.until(calls.trigger, others)
        return f"({head} {calls.whole(opened=True)})* {writer.free(tool_parser.starts.strings)}"

    def _channels(self, calls: _Calls, writer: RuleWriter) -> str:
        channels = named(self.tool_parser).channels
        assert channels is not None, "the caller has looked"
        end = channels.end + channels.again
        asides = [
            f"{writer.text(begin)} {writer.raw(_STRING, end, channels.end)}"
            for begin in (channels.reasoning, channels.remark)
        ]
        answer = f"{writer.text(channels.answer)} {'ANY' if self.answer is None else '@answer'}"
        last = [calls.whole()] if self.functions else []
        return f"{writer.either(asides)}* {writer.either(last if self.must_call else [*last, answer])}"


def _named(name: str, source: str) -> list[dict[str, Any]]:
    """Return the parts of the grammar `source`, with the first part named `name`, for use inside another grammar."""
    first, *others = json.loads(source)["grammars"]
    return [{**first, "name": name}, *others]


class _Calls:
    """Builder of the grammar rules for calls. `trigger`: marker that begins a list of calls, or None."""

    def __init__(
        self, writer: RuleWriter, tool_parser: type[ToolParser], functions: Sequence[FunctionRule], *, several: bool
    ) -> None:
        self._writer = writer
        self._format = call_format = writer.fitting(tool_parser.call_formats)
        self._several = several and call_format.several
        self._calls = [(function.name, _arguments(writer, tool_parser, function)) for function in functions]
        beginning = call_format.before or call_format.begin
        self.trigger = next((start for start in tool_parser.starts.strings if beginning.startswith(start)), None)

    def whole(self, *, opened: bool = False) -> str:
        """Return the rule of a list of calls. `opened`: the trigger was already written, so the rule omits it."""
        call_format, taken = self._format, self.trigger if opened else None
        before, begin = call_format.before, call_format.begin
        if taken is not None:
            before, begin = (before.removeprefix(taken), begin) if before else ("", begin.removeprefix(taken))
        calls = self._one(begin)
        if self._several:
            calls = f"{calls} ({self._text(call_format.between)} {self._one(call_format.begin)})*"
        return f"{self._text(before)} {calls} {self._text(call_format.after)}"

    def _one(self, begin: str) -> str:
        calls = [
            f"{self._begin(begin, name)} {arguments} {self._text(self._format.end)}" for name, arguments in self._calls
        ]
        return self._writer.rule(" | ".join(calls))

    def _begin(self, begin: str, name: str) -> str:
        return " /[0-9]{1,3}/ ".join(self._text(piece.replace("NAME", name, 1)) for piece in begin.split("NUMBER"))

    def _text(self, text: str) -> str:
        return self._writer.text(text) if text else ""


def _arguments(writer: RuleWriter, tool_parser: type[ToolParser], function: FunctionRule) -> str:
    schema = {"type": "object", **function.schema}
    if schema["type"] != "object":
        raise GrammarError(f"the parameters of a function must be an object, not {clip(json.dumps(schema['type']))}")
    if "properties" in schema and not schema.keys() & _OPEN_ENDED:
        schema["additionalProperties"] = False  # what a function does not name it would not understand
    check_schema(schema)
    writer.root = schema
    if function.input is not None:
        schema["properties"] = {"input": writer.text_schema(function.input)}
    return tool_parser.arguments(writer, schema)
