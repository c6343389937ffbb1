"""Parts of streams that all APIs share: encoding of events, constant bytes around a text, and errors.

The constant parts of an event are encoded once. A token then costs only the JSON encoding of its text and one join."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from msgspec import Raw, Struct
from msgspec.json import encode

from runtime.api import FinishReason, Output
from server.generate.generation import Choice, Generation
from server.http.errors import Aborted, ApiError, as_api_error
from server.http.sse import Frames

HOLE = "\x00text\x00"  # stands for a text in an event whose constant bytes are wanted
_HOLE = encode(HOLE)


def event(body: object) -> bytes:
    """Encode `body` as a server-sent event without a name."""
    return b"data: " + encode(body) + b"\n\n"


def named_event(body: Struct) -> bytes:
    """Encode `body` as a server-sent event. The event's name is the tag of the body's type."""
    return _head(type(body)) + encode(body) + b"\n\n"


@cache
def _head(kind: type[Struct]) -> bytes:
    return f"event: {kind.__struct_config__.tag}\ndata: ".encode("ascii")


def around(frame: bytes) -> tuple[bytes, bytes]:
    """Split `frame` at the placeholder HOLE. Return the bytes before and after it."""
    before, after = frame.split(_HOLE)
    return before, after


def encoded(json: str | bytes) -> Any:
    """Wrap `json`, which is already encoded, so that it can be the value of a field."""
    return Raw(json.encode() if isinstance(json, str) else json)


class AnswerFrames(Frames[Sequence[Output]]):
    """Converter of one answer's Outputs to the bytes of a stream. `write_error`: function that encodes errors."""

    def __init__(self, generation: Generation, request_id: str, write_error: Callable[[ApiError], bytes]) -> None:
        self._generation = generation
        self._request_id = request_id
        self._write_error = write_error

    def feed(self, outputs: Sequence[Output]) -> bytes:
        return b"".join(frame for output in outputs for frame in self._frames(output))

    def _frames(self, output: Output) -> Iterable[bytes]:
        raise NotImplementedError

    def end(self) -> bytes:
        return b""

    def fail(self, error: Exception) -> bytes:
        return self._write_error(as_api_error(error, self._request_id))


def check_not_aborted(choice: Choice) -> None:
    """Raise Aborted if the server aborted `choice`. For APIs that have no finish reason for it."""
    if choice.finish_reason == FinishReason.ABORT:
        raise Aborted
