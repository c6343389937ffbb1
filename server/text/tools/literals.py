"""Streaming conversion of Python and JavaScript literals to JSON.

Supported are strings in single, double or triple quotes with Python's escapes, numbers, True and true, None and null, lists,
tuples and dictionaries. Names, function calls and operators are invalid."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Final

from server.text.json_stream import NUMBER
from server.text.markers import FedText, Markers, Parse

Emit = Callable[[str], object]

MAX_DEPTH: Final = 32  # each level is a generator inside another
_WORDS: Final = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_QUOTES: Final = ('"""', "'''", '"', "'")
_ENDS: Final = {quote: Markers(quote, "\\") for quote in _QUOTES}
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_CODE_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}


def inside(text: str) -> str:
    """Return `text` escaped for use in a JSON string, without quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def python_value(source: FedText, emit: Emit, depth: int = 0) -> Parse[bool]:
    """Consume one literal from `source` and emit it as JSON. Return False if the literal is missing, invalid or incomplete."""
    char = yield from source.space()
    if char and char in "\"'":
        return (yield from _string(source, emit))
    if char and char in "[({":
        source.take(1)
        if depth == MAX_DEPTH:
            return False
        return (yield from (_dict(source, emit, depth) if char == "{" else _list(source, emit, depth, char)))
    word = yield from source.word()
    known = _WORDS.get(word) or number(word)
    if known is None:
        return False
    emit(known)
    return True


def number(word: str) -> str | None:
    """Return the number `word` in JSON syntax, or None if `word` is not a number or JSON cannot express it."""
    if NUMBER.fullmatch(word):
        return word
    try:
        value = float(word)
        return (
            (str(int(word)) if re.fullmatch(r"[+-]?[0-9_]+", word) else repr(value)) if math.isfinite(value) else None
        )
    except ValueError:
        return None


def _string(source: FedText, emit: Emit) -> Parse[bool]:
    for quote in _QUOTES:
        if (yield from source.literal(quote)):
            break
    emit('"')
    while True:
        end = yield from source.until(_ENDS[quote], lambda text: emit(inside(text)))
        if end == quote:
            emit('"')
            return True
        if not end or not (yield from _escape(source, emit)):
            return False


def _escape(source: FedText, emit: Emit) -> Parse[bool]:
    """Parse an escape sequence after its backslash. If the sequence is invalid, emit the backslash itself, as Python does."""
    char = yield from source.peek()
    if char in _CODE_LENGTHS:
        source.take(1)
        digits = ""
        while len(digits) < _CODE_LENGTHS[char] and (yield from source.peek()):
            digits += source.take(1)
        whole = len(digits) == _CODE_LENGTHS[char] and re.fullmatch(r"[0-9a-fA-F]+", digits)
        if not whole or int(digits, 16) > 0x10FFFF:
            return False
        emit(json.dumps(chr(int(digits, 16)))[1:-1])
    elif char in _ESCAPES:
        source.take(1)
        emit(inside(_ESCAPES[char]))
    else:
        emit("\\\\")
    return char != ""


def _list(source: FedText, emit: Emit, depth: int, opening: str) -> Parse[bool]:
    closing = "]" if opening == "[" else ")"
    emit("[")
    separator = ""
    while True:
        yield from source.space()
        if (yield from source.literal(closing)):
            emit("]")
            return True
        emit(separator)
        if not (yield from python_value(source, emit, depth + 1)):
            return False
        yield from source.space()
        separator = ", " if (yield from source.literal(",")) else ""
        if not separator and (yield from source.peek()) != closing:
            return False


def _dict(source: FedText, emit: Emit, depth: int) -> Parse[bool]:
    emit("{")
    separator = ""
    while True:
        char = yield from source.space()
        if (yield from source.literal("}")):
            emit("}")
            return True
        emit(separator)
        if not char or char not in "\"'" or not (yield from _string(source, emit)):
            return False
        yield from source.space()
        if not (yield from source.literal(":")):
            return False
        emit(": ")
        if not (yield from python_value(source, emit, depth + 1)):
            return False
        yield from source.space()
        separator = ", " if (yield from source.literal(",")) else ""
        if not separator and (yield from source.peek()) != "}":
            return False


def python_to_json(text: str) -> str | None:
    """Convert a complete Python literal to JSON. Return None if `text` is not a literal."""
    source, pieces = FedText(), list[str]()
    source.feed(text)
    source.closed = True
    parsing = python_value(source, pieces.append)
    try:
        while True:
            next(parsing)
    except StopIteration as end:
        whole = bool(end.value)
    return "".join(pieces) if whole and not source.take(source.num_pending).strip() else None
