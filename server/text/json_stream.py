"""Streaming JSON parser: reads one value to its end, checks it, and emits it piece by piece.

The output is valid JSON once the value is complete. One common error of models is repaired: unescaped control characters in
strings, mostly line breaks, are escaped. Other invalid JSON ends the value. The cost is linear in the text's length. The nesting
depth is limited to what JSON parsers accept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from server.text.markers import FedText, Parse

MAX_DEPTH: Final = 200  # Python's own parser gives up near 1000
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
_NUMERIC: Final = re.compile(r"[0-9+\-.eE]+")
NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS: Final = {"t": "true", "f": "false", "n": "null"}
_SPACE: Final = " \t\r\n"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class JsonScanner:
    """Incremental scanner of one JSON value. `done`: the value is complete. `failed`: the value is invalid."""

    __slots__ = ("_awaited", "_in_key", "_number", "_out", "_stack", "_state", "done", "failed")

    def __init__(self, emit: Callable[[str], object]) -> None:
        self._out = emit
        self._state: Callable[[str, int], int] = self._value
        self._stack: list[str] = []  # the closing brackets awaited
        self._awaited = ""  # of a word or an escape, what must follow
        self._number: list[str] = []
        self._in_key = False
        self.done = False
        self.failed = False

    def scan(self, text: str, at: int) -> int:
        """Scan `text` from index `at` on. Return the index at which scanning stops: after the last valid character of the value."""
        while at < len(text) and not self.done and not self.failed:
            at = self._state(text, at)
        return at

    def close(self) -> None:
        """End the input. A number at the end is complete; any other incomplete value sets `failed`."""
        if self._state == self._in_number:
            self._end_number()
        self.failed = not self.done

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    def _pass(self, char: str, state: Callable[[str, int], int], at: int) -> int:
        self._out(char)
        self._state = state
        return at + 1

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            return self._pass(char, self._state, at)
        if char == '"':
            self._in_key = False
            return self._pass(char, self._in_string, at)
        if char in "{[" and len(self._stack) < MAX_DEPTH:
            self._stack.append("}" if char == "{" else "]")
            return self._pass(char, self._first_key if char == "{" else self._first_item, at)
        if char in _WORDS:
            self._awaited = _WORDS[char][1:]
            return self._pass(char, self._in_word, at)
        if char in "-0123456789":
            self._state = self._in_number
            return at
        return self._fail(at)

    def _first_item(self, text: str, at: int) -> int:
        return self._after(text, at) if text[at] == "]" else self._value(text, at)

    def _first_key(self, text: str, at: int) -> int:
        return self._after(text, at) if text[at] == "}" else self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            return self._pass(char, self._state, at)
        self._in_key = True
        return self._pass(char, self._in_string, at) if char == '"' else self._fail(at)

    def _colon(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            return self._pass(char, self._state, at)
        return self._pass(char, self._value, at) if char == ":" else self._fail(at)

    def _after(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            return self._pass(char, self._state, at)
        if char == self._stack[-1]:
            self._stack.pop()
            self._out(char)
            self._end_value()
            return at + 1
        if char == ",":
            return self._pass(char, self._key if self._stack[-1] == "}" else self._value, at)
        return self._fail(at)

    def _end_value(self) -> None:
        self._state = self._after
        self.done = not self._stack

    def _in_string(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        if plain:
            self._out(plain.group())
            return plain.end()
        char = text[at]
        if char == '"':
            self._out(char)
            if self._in_key:
                self._state = self._colon
            else:
                self._end_value()
            return at + 1
        if char == "\\":
            return self._pass(char, self._in_escape, at)
        self._out(json.dumps(char)[1:-1])
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        char = text[at]
        if char == "u":
            self._awaited = "hhhh"
            return self._pass(char, self._in_hex, at)
        return self._pass(char, self._in_string, at) if char in '"\\/bfnrt' else self._fail(at)

    def _in_hex(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._fail(at)
        self._awaited = self._awaited[1:]
        return self._pass(text[at], self._in_hex if self._awaited else self._in_string, at)

    def _in_word(self, text: str, at: int) -> int:
        if text[at] != self._awaited[0]:
            return self._fail(at)
        self._out(text[at])
        self._awaited = self._awaited[1:]
        if not self._awaited:
            self._end_value()
        return at + 1

    def _in_number(self, text: str, at: int) -> int:
        match = _NUMERIC.match(text, at)
        if match:
            self._number.append(match.group())
            self._out(match.group())
            return match.end()
        self._end_number()
        return at

    def _end_number(self) -> None:
        valid = NUMBER.fullmatch("".join(self._number))
        self._number = []
        if valid:
            self._end_value()
        else:
            self.failed = True


def json_value(source: FedText, emit: Callable[[str], object]) -> Parse[bool]:
    """Consume one JSON value from `source` and call `emit` with each piece. Return False if the value is invalid or incomplete."""
    scanner = JsonScanner(emit)
    while True:
        source.scan(scanner.scan)
        if source.closed and not scanner.done:
            scanner.close()
        if scanner.done or scanner.failed:
            return scanner.done
        yield


def json_string(source: FedText) -> Parse[str | None]:
    """Consume a JSON string and return its decoded text. Return None if no valid string follows, or its text is not valid UTF-8."""
    if (yield from source.space()) != '"':
        return None
    pieces: list[str] = []
    if not (yield from json_value(source, pieces.append)):
        return None
    text = str(json.loads("".join(pieces)))
    return None if _SURROGATE.search(text) else text


def whole_json(text: str) -> str | None:
    """Return `text` as one valid JSON value with control characters escaped, or None if `text` is invalid."""
    pieces: list[str] = []
    scanner = JsonScanner(pieces.append)
    at = scanner.scan(text, 0)
    if not scanner.done and not scanner.failed:
        scanner.close()
    return "".join(pieces) if scanner.done and not text[at:].strip() else None
