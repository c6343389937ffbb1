"""ParsingCodec: a codec whose parser is a generator, which reads in the order of the format and yields to wait for text."""

from __future__ import annotations

from server.text.events import Event
from server.text.markers import FedText, Parse


class ParsingCodec:
    """Base of codecs with a `_parse` generator, which `__init__` runs to its first wait: set its attributes before."""

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
        """Emit events still held back when all text is parsed."""

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events
