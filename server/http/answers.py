"""JSON responses, encoded in pieces if they are large, and responses that are sent in chunks.

Writing or freeing a long list is one call that holds the interpreter: 45,000 log-probabilities take 5 ms to write and 8 ms to
free. Every stream of the process is delayed meanwhile. Long values are therefore written and freed in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import UNSET, Struct
from msgspec.json import encode
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

RECORDS, NUMBERS = 64, 4096  # elements of a list per piece: objects and lists, or numbers and texts
MAX_DEPTH = 6  # of lists that may be long: an answer's choices' log-probabilities' content, and one more


def json_response(body: object, status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")


def long_json_response(body: object) -> Response:
    """Return the JSON response of `body`, encoded piece by piece. Call it on a thread; it empties the long lists of `body`."""
    content = written(body)
    let_go(body)
    return Response(content, media_type="application/json")


class ChunkedJson:
    """ASGI response whose body is the JSON text in `chunks`. A chunk is sent once the previous chunk was written, to avoid
    copying the body."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = str(sum(map(len, self._chunks))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = len(self._chunks) - 1
        for number, chunk in enumerate(self._chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": number < last})


def written(body: object) -> bytes:
    """Return the JSON text of `body`, encoded piece by piece: the same bytes as `msgspec.json.encode` returns."""
    return b"".join(_pieces(body, MAX_DEPTH))


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    size = _piece_of(value)
    if not depth or not size:
        yield encode(value)
    elif isinstance(value, dict | Struct):
        yield b"{"
        for number, (name, inside) in enumerate(_members(value)):
            yield b"," * bool(number) + encode(name) + b":"
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
            yield encode(value[start : start + size])[1:-1]
        yield b"]"


def _members(value: dict[str, Any] | Struct) -> Iterable[tuple[str, Any]]:
    """Return (name, value) of each member that an object has in JSON."""
    if isinstance(value, dict):
        return value.items()
    fields = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    named = ((name, getattr(value, field)) for name, field in fields)
    return ((name, inside) for name, inside in named if inside is not UNSET)


def _piece_of(value: Any) -> int:
    """Return the number of elements of `value` that are encoded in one call; 0 if `value` must be encoded whole."""
    if type(value) is dict or _is_untagged(value):
        return RECORDS
    if type(value) is not list or not value:
        return 0
    if _has_objects(value):
        return RECORDS
    return NUMBERS if len(value) > NUMBERS else 0


def _is_untagged(value: Any) -> bool:
    """Return whether `value` is a Struct without a tag field."""
    return isinstance(value, Struct) and value.__struct_config__.tag is None


def _has_objects(value: list[Any]) -> bool:
    """Return whether the first or last element is an object or list. The first can be null (prompt log-probabilities)."""
    return isinstance(value[0], dict | list | Struct) or isinstance(value[-1], dict | list | Struct)


def let_go(body: Any, depth: int = MAX_DEPTH) -> None:
    """Empty the long lists of objects in `body`, in pieces, after the last use of `body`. `depth`: nesting levels to search."""
    if not depth:
        return
    if isinstance(body, dict | Struct):
        for _, inside in _members(body):
            let_go(inside, depth - 1)
    elif type(body) is list and body and _has_objects(body):
        if len(body) > RECORDS:
            release(body)
        for inside in body:
            let_go(inside, depth - 1)


def release(values: list[Any]) -> None:
    """Empty a list in pieces, so that other threads can run in between."""
    while values:
        del values[-RECORDS:]
