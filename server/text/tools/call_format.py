"""Descriptions of tool call formats, used to constrain a model's output to its own format.

A format is an expression in Lark grammar syntax. A Writer creates the expressions for tokens and JSON schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from server.text.tools.schemas import Schema


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of a list of calls: `before` the list, then `begin`, arguments and `end` of each call, `between` two calls, `after`
    the list. NAME stands for the function's name, NUMBER for digits. `only_with`: special token that the tokenizer must have."""

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
    """Markers of a format in which an answer has several messages, such as harmony. `reasoning`, `remark`, `answer`: begin of
    each kind of message. `end`: end of a message before the last. `again`: text between `end` and the next message."""

    begin: str  # every one of them
    reasoning: str
    remark: str
    answer: str
    end: str
    again: str


class Writer(Protocol):
    """Builder of expressions in Lark syntax. Every method raises ValueError for unsupported schemas; the message is for clients."""

    def text(self, text: str) -> str: ...

    def either(self, expressions: Iterable[str]) -> str: ...

    def json(self, schema: Schema) -> str:
        """Return the expression of a JSON value that matches `schema`."""
        ...

    def kinds(self, schema: Schema) -> Sequence[Schema]:
        """Split `schema` into its alternatives. Each alternative has a single `type`, or an `enum`. If `schema` cannot be split,
        return it alone."""
        ...

    def raw(self, schema: Schema, end: str, marker: str) -> str:
        """Return the expression of a value and its closing tag `end`. Strings have no quotes; other values are JSON. `marker`:
        the part of `end` that a string must not contain."""
        ...

    def members(self, schema: Schema, separator: str, write: Callable[[str, Schema], str]) -> str:
        """Return the expression of an object's properties, in schema order. Properties that are not required are optional."""
        ...
