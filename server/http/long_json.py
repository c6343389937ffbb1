"""JSON of what is long: written piece by piece, and let go of piece by piece.

Both are else one call that keeps the interpreter to itself: 45,000 log-probabilities take 5 ms to write and 8 to free, for which
every stream would wait, whichever thread does it. Between two pieces others have their turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orjson import dumps

from server.http.release import AT_ONCE, release

RECORDS, NUMBERS = AT_ONCE, 4096  # elements of a list that are a piece: objects and lists, or numbers and texts
MAX_DEPTH = 6  # of lists that may be long: an answer's choices' log-probabilities' content, and one more


def written(body: object) -> bytes:
    """What `orjson.dumps` gives."""
    return b"".join(_pieces(body, MAX_DEPTH))


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    size = _piece_of(value)
    if not depth or not size:
        yield dumps(value)
    elif isinstance(value, dict):
        yield b"{"
        for number, (name, inside) in enumerate(value.items()):
            yield b"," * bool(number) + dumps(name) + b":"
            yield from _pieces(inside, depth - 1)
        yield b"}"
    elif len(value) <= size:
        yield b"["
        for number, inside in enumerate(value):
            yield b"," * bool(number)
            yield from _pieces(inside, depth - 1)
        yield b"]"
    else:
        for start in range(0, len(value), size):
            yield b"," if start else b"["
            yield dumps(value[start : start + size])[1:-1]
        yield b"]"


def _piece_of(value: Any) -> int:
    """So many elements of it are a piece; 0 for what is one whole."""
    if type(value) is dict:
        return RECORDS
    if type(value) is not list or not value:
        return 0
    if _has_objects(value):
        return RECORDS
    return NUMBERS if len(value) > NUMBERS else 0


def _has_objects(value: list[Any]) -> bool:
    """By its ends: the first token of a prompt has no log-probability."""
    return isinstance(value[0], (dict, list)) or isinstance(value[-1], (dict, list))


def let_go(body: Any, depth: int = MAX_DEPTH) -> None:
    """Empty the long lists of objects that `body` has, which nobody reads any more."""
    if not depth:
        return
    if type(body) is dict:
        for inside in body.values():
            let_go(inside, depth - 1)
    elif type(body) is list and body and _has_objects(body):
        if len(body) > RECORDS:
            release(body)
        for inside in body:
            let_go(inside, depth - 1)
