"""Formats of tool calls as data, to constrain a model to its own format.

A format is an expression in Lark's syntax, assembled by a Writer, which alone knows tokens and JSON schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from server.text.tools.schemas import Schema


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A list of calls: `before` it, each call's `begin`, arguments and `end`, `between` two of them, `after` the last. NAME
    stands for the function's, NUMBER for digits. `only_with`: for tokenizers that have this special token."""

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
    """Channels of formats in which an answer is several messages: how they begin, what ends all but the last, and what
    follows that."""

    begin: str  # every one of them
    reasoning: str
    remark: str
    answer: str
    end: str
    again: str


class Writer(Protocol):
    """Makes expressions. Every method raises ValueError, in words for the client, for what cannot be written."""

    def text(self, text: str) -> str: ...

    def either(self, expressions: Iterable[str]) -> str: ...

    def json(self, schema: Schema) -> str:
        """A JSON value."""
        ...

    def kinds(self, schema: Schema) -> Sequence[Schema]:
        """Return the alternatives of a schema. Each has a `type` that is one word, or an `enum`, or neither if it cannot be
        split."""
        ...

    def raw(self, schema: Schema, end: str, marker: str) -> str:
        """A value as it stands between tags, strings without quotes and all else as JSON, and `end`. `marker`: the part of the
        end that a string may not hold."""
        ...

    def members(self, schema: Schema, separator: str, write: Callable[[str, Schema], str]) -> str:
        """The properties of an object, in their order, those that are not required as the model likes."""
        ...
