"""Incremental search of text for the first of several marker strings, and the text source of all parsers.

A parser is a generator over a `FedText`. It consumes text as soon as its meaning is certain, and yields if the meaning depends
on text that has not arrived. The result therefore does not depend on how the text was split. No text is scanned twice, except a
few characters that may begin a marker."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

T = TypeVar("T")
Parse = Generator[None, None, T]  # yields where it needs more text; returns what it read

_WORD: Final = re.compile(r"[\w.+\-]*")
_SPACE: Final = re.compile(r"[ \t\r\n]*")


class Markers:
    """Set of marker strings to search for. No marker may be a prefix of another, since a match would be ambiguous."""

    __slots__ = ("_beginnings", "_longest", "_pattern", "strings")

    def __init__(self, *strings: str) -> None:
        if any(a != b and b.startswith(a) for a in strings for b in strings):
            raise ValueError(f"one marker begins another: {strings}")
        self.strings = strings
        self._beginnings = frozenset(string[0] for string in strings)
        self._longest = max(map(len, strings))
        self._pattern = re.compile("|".join(map(re.escape, strings)))

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def beginning(self, text: str, at: int) -> int:
        """Return the first index, from `at` on, at which the end of `text` may begin a marker; len(text) if there is none."""
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[start] in self._beginnings:
                tail = text[start:]
                if any(len(string) > len(tail) and string.startswith(tail) for string in self.strings):
                    return start
        return len(text)


class FedText:
    """Buffer of text that was fed but not yet consumed. `closed`: no more text follows.

    While a record is active, consumed text is also kept, to be emitted as plain text if parsing fails."""

    __slots__ = ("_at", "_recorded", "_text", "closed")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None
        self.closed = False

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def num_pending(self) -> int:
        """Number of characters that were fed but not yet consumed."""
        return len(self._text) - self._at

    def record(self, taken: str = "") -> None:
        """Start a new record of consumed text. The record begins with `taken`."""
        self._recorded = [taken]

    def recorded(self) -> str:
        """Stop the record and return its text."""
        text, self._recorded = "".join(self._recorded or ()), None
        return text

    def take(self, count: int) -> str:
        taken = self._text[self._at : self._at + count]
        self._at += count
        if self._recorded is not None:
            self._recorded.append(taken)
        return taken

    def until(self, markers: Markers, emit: Callable[[str], object]) -> Parse[str]:
        """Consume text up to and including the first of `markers`, and emit the text before it. Return the marker, or "" at the
        end."""
        while True:
            found = markers.search(self._text, self._at)
            end = len(self._text) if self.closed else markers.beginning(self._text, self._at)
            stop = found.start() if found and found.start() < end else end
            if stop > self._at:
                emit(self.take(stop - self._at))
            if found and found.start() == stop:
                return self.take(len(found.group()))
            if self.closed:
                return ""
            yield

    def rest(self, emit: Callable[[str], object]) -> Parse[None]:
        """Consume all text up to its end, and call `emit` with each piece."""
        while True:
            if self.num_pending:
                emit(self.take(self.num_pending))
            if self.closed:
                return
            yield

    def literal(self, string: str) -> Parse[bool]:
        """Consume `string` if the text continues with it. Return True if `string` was consumed."""
        while True:
            if self._text.startswith(string, self._at):
                self.take(len(string))
                return True
            if self.closed or not string.startswith(self._text[self._at : self._at + len(string)]):
                return False
            yield

    def space(self) -> Parse[str]:
        """Consume white space. Return the next character without consuming it, or "" at the end of the text."""
        while True:
            self._take_run(_SPACE)
            if self.num_pending:
                return self._text[self._at]
            if self.closed:
                return ""
            yield

    def peek(self) -> Parse[str]:
        """Return the next character without consuming it, or "" at the end of the text."""
        while not self.num_pending:
            if self.closed:
                return ""
            yield
        return self._text[self._at]

    def word(self) -> Parse[str]:
        """Consume and return the longest run of letters, digits and the characters `_.+-`."""
        return (yield from self.run(_WORD))

    def run(self, pattern: re.Pattern[str]) -> Parse[str]:
        """Consume and return the longest run of characters that match `pattern`, one repeated character class."""
        pieces: list[str] = []
        while True:
            pieces.append(self._take_run(pattern))
            if self.num_pending or self.closed:
                return "".join(pieces)
            yield

    def scan(self, scan: Callable[[str, int], int]) -> bool:
        """Consume text up to the index that `scan(text, index)` returns. Return False if no text was pending."""
        if not self.num_pending:
            return False
        self.take(scan(self._text, self._at) - self._at)
        return True

    def _take_run(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""
