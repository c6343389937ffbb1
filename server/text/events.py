"""Events: text, reasoning and tool calls in a model's output, in order.

A codec is fed text and returns events. Joined by kind (and by call), their texts do not depend on how the text was split.
Independent of any model's markup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of tool call number `index` (from 0). `id`: the model's own id of the call, which its template requires back."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the JSON arguments of tool call `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """Failure of tool call `index` after its ToolCall event: its arguments are incomplete, and no more follow.

    `text`: everything the model wrote of the call, markers included. A call that breaks before its ToolCall is plain Text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CutOff(Malformed):
    """Malformed call that was valid until the answer ended at its token limit."""


Event = Text | Reasoning | ToolCallStart | ToolArguments | Malformed


class Codec(Protocol):
    @property
    def reasoning(self) -> bool:
        """True while the text is inside reasoning."""
        ...

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""
        ...

    def flush(self) -> list[Event]:
        """Return the events still held back at the end of the text. Feed nothing afterwards."""
        ...


class CodecChain:
    """Chain of two codecs: the second receives the Text events of the first."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Codec, second: Codec) -> None:
        self._first = first
        self._second = second

    @property
    def reasoning(self) -> bool:
        return self._first.reasoning or self._second.reasoning

    def feed(self, text: str) -> list[Event]:
        return self._pass(self._first.feed(text))

    def flush(self) -> list[Event]:
        return self._pass(self._first.flush()) + self._second.flush()

    def _pass(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                passed += self._second.feed(event.text)
            else:
                passed.append(event)
        return passed


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """Join adjacent events of the same kind and call."""
    for (kind, index), group in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        alike = list(group)
        if kind is Text:
            yield Text("".join(event.text for event in alike if isinstance(event, Text)))
        elif kind is Reasoning:
            yield Reasoning("".join(event.text for event in alike if isinstance(event, Reasoning)))
        elif kind is ToolArguments and index is not None:
            yield ToolArguments(index, "".join(event.text for event in alike if isinstance(event, ToolArguments)))
        else:
            yield from alike
