"""Base class of codecs whose parser is a generator. The generator yields when it needs more text."""

from __future__ import annotations

from server.text.events import Event
from server.text.markers import FedText, Parse


class ParsingCodec:
    """Base class of codecs with a generator `_parse`. `__init__` runs it to its first yield, so set attributes before that call."""

    reasoning = False  # the parser's to say; see Codec

    def __init__(self) -> None:
        self.source = FedText()
        self._events: list[Event] = []
        self._parsing = self._parse()
        next(self._parsing)

    def feed(self, text: str) -> list[Event]:
        self.source.feed(text)
        next(self._parsing, None)
        return self._drain()

    def flush(self) -> list[Event]:
        self.source.closed = True
        next(self._parsing, None)
        self._at_end()
        return self._drain()

    def _parse(self) -> Parse[None]:
        raise NotImplementedError

    def _at_end(self) -> None:
        """Append the events still held back after all text was parsed."""

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events
