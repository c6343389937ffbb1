"""ParsingCodec: a codec written as one parser, a generator that reads in the order of the format and yields for more text."""

from __future__ import annotations

from server.text.events import Event
from server.text.markers import Parse, Source


class ParsingCodec:
    """A subclass sets what its `_parse` needs, then calls this `__init__`: the parser runs at once, up to its first wait."""

    reasoning = False  # the parser's to say; see Codec

    def __init__(self) -> None:
        self.source = Source()
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
        """The text is over and parsed: what was held back may still be said."""

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events
