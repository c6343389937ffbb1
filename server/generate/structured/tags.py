"""Structural tags: free text in which certain strings start a part with its own grammar, such as a tool call.

The format is xgrammar's, as used by vLLM's clients: a tree of formats, or the older list of structures with triggers. It is
converted to one Lark grammar. Formats with token ids are rejected."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import llguidance
from msgspec import Struct

from server.generate.structured.grammar import (
    MAX_CHARS,
    MAX_DEPTH,
    MAX_RULE_CHARS,
    GrammarError,
    JsonSchema,
    Rules,
    Whitespace,
    check_length,
    read_json,
)
from server.generate.structured.rules import RuleWriter
from server.models.tokenizer import Tokenizer


class StructuralTag(Struct, frozen=True, tag=True):
    """Structural tag. `tag`: {"format": …}, or {"structures": [{"begin", "schema", "end"}], "triggers": […]}, as an object or as
    JSON text."""

    tag: Any
    whitespace: Whitespace = "compact"
    pattern: str | None = None  # of white space, as JsonSchema has it
    closed: bool = True

    def source(self, tokenizer: Tokenizer) -> str:
        tag = read_json(self.tag, "the structural tag")
        if not isinstance(tag, dict):
            raise GrammarError("a structural tag must be an object")
        check_length("the structural tag", json.dumps(tag), MAX_CHARS)

        def json_schema(schema: Any) -> dict[str, Any]:
            return JsonSchema(schema, self.whitespace, self.pattern, self.closed).checked()

        return _Writer(tokenizer, json_schema).grammar(tag)


class _Writer:
    """Converter of a structural tag to a Lark grammar."""

    def __init__(self, tokenizer: Tokenizer, json_schema: Callable[[Any], dict[str, Any]]) -> None:
        self._lark = RuleWriter(tokenizer)
        self._literal, self._rule = self._lark.text, self._lark.rule
        self._json_schema = json_schema
        self._depth = 0
        self._kinds: Mapping[str, Callable[[_Format], str]] = {
            "const_string": lambda format: self._literal(format.text("value")),
            "json_schema": self._json,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": lambda format: self._lark.free(format.texts("excludes")),
            "sequence": self._sequence,
            "or": lambda format: f"({' | '.join(self._each(format, 'elements'))})",
            "optional": lambda format: f"({self._write(format.format('content'))})?",
            "star": lambda format: f"({self._write(format.format('content'))})*",
            "plus": lambda format: f"({self._write(format.format('content'))})+",
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def grammar(self, tag: dict[str, Any]) -> str:
        start = self._write(_Format(_as_format(tag), "format"))
        return json.dumps({"grammars": [{"lark_grammar": self._lark.grammar(start)}, *self._lark.others]})

    # --- expressions ----------------------------------------------------------------------------------------------

    def _write(self, format: _Format) -> str:
        kind = format.text("type")
        if kind not in self._kinds:
            raise GrammarError(f"{format.where}: type {kind!r} is not supported; there are {', '.join(self._kinds)}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise GrammarError(f"the structural tag is nested deeper than {MAX_DEPTH} formats")
        written = self._kinds[kind](format)
        self._depth -= 1
        return written

    def _each(self, format: _Format, name: str) -> list[str]:
        return [self._write(element) for element in format.formats(name)]

    def _json(self, format: _Format) -> str:
        style = format.get("style", "json")
        if style != "json":
            raise GrammarError(f"{format.where}: style {style!r} is not supported; there is json")
        try:
            schema = self._json_schema(format.get("json_schema"))
        except GrammarError as error:
            raise GrammarError(f"{format.where}: {error}") from None
        return self._rule(f"%json {json.dumps(schema)}")

    def _regex(self, format: _Format) -> str:
        pattern = format.text("pattern")
        check_length(f"{format.where}.pattern", pattern, MAX_RULE_CHARS)
        return self._rule(f"/{llguidance.regex_to_lark(pattern, '')}/")

    def _grammar(self, format: _Format) -> str:
        return f"@{self._lark.other('g', Rules(format.text('grammar')).lark())}"

    def _text_until(self, marker: str, where: str) -> str:
        """Return an expression for any text up to and including the first `marker`. `where`: path in the tag, for errors."""
        if "<[" in (written := self._literal(marker)) and not written.startswith("<["):
            raise GrammarError(f"{where}: {marker!r} mixes text with special tokens, so free text cannot end at it")
        return self._lark.until(marker)

    def _sequence(self, format: _Format) -> str:
        elements = self._each(format, "elements")
        for element, following in pairwise(zip(format.formats("elements"), elements, strict=True)):
            if element[0].text("type") == "any_text" and not following[1].startswith("<["):
                raise GrammarError(
                    f"{element[0].where}: only a special token can end any_text; put it last, or into a tag with an end"
                )
        return " ".join(elements)

    def _repeat(self, format: _Format) -> str:
        least, most = format.get("min", 0), format.get("max", -1)
        if not isinstance(least, int) or not isinstance(most, int) or least < 0 or (most != -1 and most < least):
            raise GrammarError(f"{format.where}: min and max must be integers with min <= max (max -1: no limit)")
        return f"({self._write(format.format('content'))}){{{least},{'' if most == -1 else most}}}"

    # --- tags -----------------------------------------------------------------------------------------------------

    def _tag(self, format: _Format) -> str:
        return self._rule(f"{self._literal(format.text('begin'))} {self._rest(format)}")

    def _rest(self, format: _Format) -> str:
        content = format.format("content")
        ends = format.texts("end") if isinstance(format.get("end"), list) else [format.text("end")]
        if content.text("type") == "any_text" and all(ends):
            return f"({' | '.join(self._text_until(end, format.where) for end in ends)})"
        return f"{self._write(content)} ({' | '.join(map(self._literal, ends))})"

    def _triggered(self, format: _Format) -> str:
        """Return a rule for free text in which each trigger starts one of the tags that begin with it."""
        triggers, tags = format.texts("triggers"), format.formats("tags")
        of_trigger: dict[str, list[str]] = {}
        for tag in tags:
            begin = tag.text("begin")
            trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError(f"{tag.where}: begin {begin!r} starts with none of the triggers")
            rest = begin.removeprefix(trigger)
            body = f"{self._literal(rest)} {self._rest(tag)}" if rest else self._rest(tag)
            of_trigger.setdefault(trigger, []).append(self._rule(body))
        heads = [
            f"{self._text_until(trigger, format.where)} ({' | '.join(bodies)})"
            for trigger, bodies in of_trigger.items()
        ]
        once = self._rule(" | ".join(heads))
        free = self._lark.free([*triggers, *format.texts("excludes")])
        least = format.get("at_least_one", False) is True
        if format.get("stop_after_first", False) is True:
            return once if least else f"({once} | {free})"
        return f"{once}{'+' if least else '*'} {free}"

    def _separated(self, format: _Format) -> str:
        tag = self._rule(" | ".join(map(self._write, format.formats("tags"))))
        several = f"{tag} ({self._literal(format.text('separator'))} {tag})*"
        if format.get("stop_after_first", False) is True:
            several = tag
        return f"({several})" if format.get("at_least_one", False) is True else f"({several})?"


class _Format:
    """Reader of one object in a structural tag. Reading an invalid field raises GrammarError with the field's path."""

    def __init__(self, fields: Any, where: str) -> None:
        if not isinstance(fields, dict):
            raise GrammarError(f"{where} is not an object")
        self._fields = fields
        self.where = where

    def get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(name, default)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise GrammarError(f"{self.where}.{name} is not a string")
        return value

    def texts(self, name: str) -> list[str]:
        values = self.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise GrammarError(f"{self.where}.{name} is not a list of strings")
        return values

    def format(self, name: str) -> _Format:
        return _Format(self.get(name), f"{self.where}.{name}")

    def formats(self, name: str) -> list[_Format]:
        values = self.get(name)
        if not isinstance(values, list) or not values:
            raise GrammarError(f"{self.where}.{name} is not a list of formats")
        return [_Format(value, f"{self.where}.{name}[{index}]") for index, value in enumerate(values)]


def _as_format(tag: dict[str, Any]) -> Any:
    if "structures" not in tag:
        return tag.get("format")
    outer = _Format(tag, "structural_tag")
    tags = []
    for structure in outer.formats("structures"):
        content = {"type": "json_schema", "json_schema": structure.get("schema")}
        tags.append({"type": "tag", "begin": structure.text("begin"), "content": content, "end": structure.text("end")})
    return {"type": "triggered_tags", "triggers": outer.texts("triggers"), "tags": tags}
