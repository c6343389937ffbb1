"""Formats of tool calls as data, which constrain a model to its own format.

A format is an expression in Lark syntax. A Writer assembles it, and provides the expressions for tokens and JSON schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from server.text.tools.schemas import Schema


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of a list of calls: `before` it, each call's `begin`, arguments and `end`, `between` calls, `after` the list.
    NAME is the function's name, NUMBER digits. `only_with`: a special token that the tokenizer must have."""

    begin: str
    end: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    only_with: str | None = None
    several: bool = True  # a model may write more than one


JSON_CALL = '{"name": "NAME", "arguments": '


@dataclass(frozen=True, slots=True)
class Channels:
    """Channels of formats in which an answer is several messages: how each begins, how all but the last end, and what comes
    after that end."""

    begin: str  # every one of them
    reasoning: str
    remark: str
    answer: str
    end: str
    again: str


class Writer(Protocol):
    """Builder of format expressions. Every method raises ValueError, with a message for the client, for unsupported schemas."""

    def text(self, text: str) -> str: ...

    def either(self, expressions: Iterable[str]) -> str: ...

    def json(self, schema: Schema) -> str:
        """Return the expression of a JSON value."""
        ...

    def kinds(self, schema: Schema) -> Sequence[Schema]:
        """Return the alternatives of a schema. Each has a `type` that is one word, or an `enum`, or neither if it cannot be
        split."""
        ...

    def raw(self, schema: Schema, end: str, marker: str) -> str:
        """Return the expression of a value between tags and its `end`: strings without quotes, other values as JSON.
        `marker`: the part of `end` that a string may not contain."""
        ...

    def members(self, schema: Schema, separator: str, write: Callable[[str, Schema], str]) -> str:
        """Return the expression of an object's properties, in schema order. Those that are not required may be left out."""
        ...
