"""Request bodies and queries: reading and decoding within limits.

Decoding is one uninterruptible call. A million empty objects in 4 MB take longer than 16 MB of text, and so does a name of
megabytes. The values of a large body are therefore counted first (`excess`, 0.3 ms per MB). The body is then joined and decoded
on a thread."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request

from server.config.server_config import ServerConfig
from server.http.call import call_of, note_ignored
from server.http.errors import BodyTooLarge, NameTooLong, TooManyValues, WrongContentType
from server.http.offload import touch_heap
from server.http.schema import T, Wire, refusal_of

R = TypeVar("R")

MAX_VALUES = 1 << 20  # of a body, where a name counts 16; token ids are the most that anybody sends
MAX_NAME_BYTES = 1 << 16
UNCOUNTED_BYTES = 1 << 18  # a body of so many cannot have enough values to matter
BYTES_PER_CHAR = 8  # of a body, to decode which takes as long as to tokenise a character


def check_head(request: Request, limit_bytes: int, *, from_any_program: bool = False) -> None:
    """Check content type and announced size before a JSON body is read. With `from_any_program`, any content type is accepted
    from clients that are not browsers (curl sends that of a form). Raises WrongContentType, BodyTooLarge."""
    given = request.headers.get("content-type")
    media_type = (given or "").partition(";")[0].strip().lower()
    # Only this type makes a browser ask first, so a page of somebody else's cannot use a server on this machine. A browser names
    # the page's origin with every POST.
    if media_type != "application/json" and not (from_any_program and "origin" not in request.headers):
        raise WrongContentType(given)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise BodyTooLarge(limit_bytes)


async def read_chunks(request: Request, limit_bytes: int, *, from_any_program: bool = False) -> list[bytes]:
    """Return the chunks of the JSON body, after `check_head`. Raises BodyTooLarge as soon as `limit_bytes` is exceeded, and the
    connection's error for a body that ended early."""
    check_head(request, limit_bytes, from_any_program=from_any_program)
    return await _chunks(request, limit_bytes)


async def _chunks(request: Request, limit_bytes: int) -> list[bytes]:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        chunks.append(chunk)
    if (incoming := call_of(request).body) is not None:
        incoming.check()
    return chunks


async def read_bytes(request: Request, limit_bytes: int) -> bytes:
    """Return the body, which may have any content type. Raises BodyTooLarge, ClientDisconnect."""
    return b"".join(await _chunks(request, limit_bytes))


def joined(chunks: list[bytes]) -> bytes:
    """Join `chunks` and empty the list. Runs on a thread. Raises TooManyValues or NameTooLong for a body that is too expensive
    to decode."""
    touch_heap(2 * sum(map(len, chunks)))  # the body, and what is decoded
    body = b"".join(chunks)
    chunks.clear()
    found = excess(body, MAX_VALUES, MAX_NAME_BYTES) if len(body) > UNCOUNTED_BYTES else None
    if found is Excess.VALUES:
        raise TooManyValues(MAX_VALUES)
    if found is Excess.NAME:
        raise NameTooLong(MAX_NAME_BYTES)
    return body


async def read_as(
    request: Request, wire: Wire[T], make: Callable[[T], R], config: ServerConfig, *, from_any_program: bool = False
) -> tuple[T, R]:
    """Return the decoded body and the result of `make(body)`. A large body is decoded and passed to `make` on a thread. Unknown
    fields are listed in a response header, or refused with --strict-fields. Raises ApiError."""
    ignored: list[str] = []
    call = call_of(request)
    incoming = call.body
    try:
        chunks = await read_chunks(request, config.max_body_size, from_any_program=from_any_program)
        call.body_cost = sum(map(len, chunks)) // BYTES_PER_CHAR

        def made() -> tuple[T, R]:
            body = joined(chunks)
            given = wire.decode(body, None if config.strict_fields else ignored)
            return given, make(given)

        found = await call.run(call.body_cost, made)
    finally:
        if incoming is not None:
            incoming.release()
    named: str | None = getattr(found[0], "request_id", None)  # of APIs whose bodies have it
    if named and "x-request-id" not in request.headers:
        call.rename(named)
    call.ignored += ignored
    return found


async def read_request(request: Request, wire: Wire[T], config: ServerConfig, *, from_any_program: bool = False) -> T:
    """Return the decoded body; see `read_as`."""
    given, _ = await read_as(request, wire, lambda given: None, config, from_any_program=from_any_program)
    return given


# --- counting values --------------------------------------------------------------------------------------------

PIECE_BYTES = 64 * 1024
INSIDE_VALUES = 4  # an object or a list takes a decoder as long as so many token ids
NAME_VALUES = 16  # and so does a name in an object


class Excess(Enum):
    VALUES = auto()
    NAME = auto()


def excess(text: bytes | bytearray, max_values: int, max_name_bytes: int) -> Excess | None:
    """Return the limit that a JSON `text` exceeds (number of values, or bytes of one name), or None. The count is exact to one
    piece of text. If `text` is not JSON the result is undefined; the decoder rejects it later."""
    count = 0
    in_string, cut_escape = False, b""
    string_bytes = 0  # of the string that a piece begins in
    may_be_name = False  # a long string has ended, and nothing came behind it yet
    for start in range(0, len(text), PIECE_BYTES):
        piece = cut_escape + text[start : start + PIECE_BYTES]
        cut_escape = b""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")
            if piece.endswith(b"\\"):
                piece, cut_escape = piece[:-1], b"\\"
            piece = piece.replace(b'\\"', b"")
        strings_and_rest = piece.split(b'"')
        if in_string:
            is_inside = len(strings_and_rest) == 1
            string_bytes += PIECE_BYTES if is_inside else len(strings_and_rest[0])
            may_be_name = not is_inside and string_bytes > max_name_bytes
        if may_be_name and len(strings_and_rest) > in_string and (behind := strings_and_rest[in_string].lstrip()):
            if behind.startswith(b":"):
                return Excess.NAME
            may_be_name = False
        outside = b"".join(strings_and_rest[in_string::2])
        if len(strings_and_rest) > 1:
            string_bytes = len(strings_and_rest[-1])
        in_string ^= not len(strings_and_rest) % 2
        count += outside.count(b",") + INSIDE_VALUES * (outside.count(b"{") + outside.count(b"["))
        count += NAME_VALUES * outside.count(b":")
        if count > max_values:
            return Excess.VALUES
    return None


# --- queries ----------------------------------------------------------------------------------------------------

Q = TypeVar("Q", bound=Struct)


def read_query(http: Request, kind: type[Q], config: ServerConfig, *, lists: Collection[str] = ()) -> Q:
    """Return the decoded query string. Unknown names are listed in a response header, or refused with --strict-fields. If a name
    is repeated, its last value counts, except for names in `lists`. Raises InvalidRequest."""
    known = {field.name for field in msgspec.structs.fields(kind)}
    given: dict[str, Any] = {}
    unknown: list[str] = []
    for key in dict.fromkeys(http.query_params):
        name, values = key.removesuffix("[]"), http.query_params.getlist(key)
        if name not in known:
            unknown.append(key)
        else:
            given[name] = values if name in lists else values[-1]
    note_ignored(http, unknown, config)
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error)) from None
