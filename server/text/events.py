"""Events in a model's output, in order: text, reasoning and tool calls.

A codec receives text and returns events. Events of one kind (or one call) concatenate to the same text, no matter how the input
was split. This module does not depend on a model's markup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Event: a piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Event: a piece of the reasoning that precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Event: start of tool call number `index` (from 0). `id`: id that the model wrote for the call, or None."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """Event: a piece of the JSON arguments of tool call `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """Event: tool call `index` became invalid after its ToolCallStart event. Its arguments are incomplete, and no more follow.

    `text`: the whole call as the model wrote it, markers included. A call that fails before ToolCallStart is returned as Text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CutOff(Malformed):
    """Event: a tool call is incomplete because the answer ended at its token limit. The call was valid so far."""


Event = Text | Reasoning | ToolCallStart | ToolArguments | Malformed


class Codec(Protocol):
    @property
    def reasoning(self) -> bool:
        """True while the fed text ends inside the reasoning."""
        ...

    def feed(self, text: str) -> list[Event]:
        """Append `text`. Return the list of events that are now complete."""
        ...

    def flush(self) -> list[Event]:
        """Return the events still held back at the end of the text. Do not call `feed` afterwards."""
        ...


class CodecChain:
    """Codec that chains two codecs: the text of the first codec's Text events is fed to the second codec."""

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
    """Yield `events` with adjacent events of the same kind and call concatenated."""
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
