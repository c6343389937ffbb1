"""Transcript of a whole answer: text, reasoning and tool calls, collected from its events.

A malformed call is added to the text, so no output is lost and every call in the list can be executed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from server.text.events import CutOff, Event, Malformed, Reasoning, Text, ToolArguments, ToolCallStart


@dataclass(frozen=True, slots=True)
class TranscriptCall:
    """Tool call of an answer. `arguments`: a JSON object, as text."""

    id: str
    name: str
    arguments: str


Part = Text | Reasoning | TranscriptCall


class Transcript:
    """Contents of one answer. `cut_off`: call that the token limit interrupted, with its text, which is also the end of `text`."""

    __slots__ = ("_heads", "_places", "_texts", "cut_off")

    def __init__(self) -> None:
        self.cut_off: tuple[TranscriptCall, str] | None = None
        self._heads: list[Text | Reasoning | ToolCallStart] = []  # what begins each part
        self._texts: list[list[str]] = []  # the pieces of each
        self._places: dict[int, int] = {}  # call to part

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ToolCallStart(index):
                    self._places[index] = len(self._heads)
                    self._begin(event)
                case ToolArguments(index, text):
                    self._texts[self._places[index]].append(text)
                case Malformed(index, text):
                    place = self._places[index]
                    begun = self._heads[place]
                    if isinstance(event, CutOff) and isinstance(begun, ToolCallStart):
                        self.cut_off = TranscriptCall(begun.id or "", begun.name, "".join(self._texts[place])), text
                    self._heads[place], self._texts[place] = Text(""), [text]
                case Text(text) | Reasoning(text):
                    if not self._heads or type(self._heads[-1]) is not type(event):
                        self._begin(event)
                    self._texts[-1].append(text)

    def _begin(self, head: Text | Reasoning | ToolCallStart) -> None:
        self._heads.append(head)
        self._texts.append([])

    @property
    def parts(self) -> list[Part]:
        found: list[Part] = []
        for head, pieces in zip(self._heads, self._texts, strict=True):
            text = "".join(pieces)
            match head:
                case ToolCallStart(_, name, id):
                    found.append(TranscriptCall(id or "", name, text))
                case Reasoning():
                    found.append(Reasoning(text))
                case Text():
                    last = found[-1] if found else None
                    if isinstance(last, Text):  # one of them was a call
                        found[-1] = Text(last.text + text)
                    else:
                        found.append(Text(text))
        return found

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[TranscriptCall]:
        return [part for part in self.parts if isinstance(part, TranscriptCall)]
