"""End of a stream whose replica has failed: an error event in the format of the client's API.

Only an event stream can end with an error. Any other response is cut off."""

from __future__ import annotations

import re

from orjson import dumps

from server.http.errors import ApiError, ErrorShape
from server.http.sse import DONE
from server.ray.exchange import Headers

RESPONSES = "/v1/responses"
_NUMBER = re.compile(rb'"sequence_number":(\d+)')


def last_words(
    error: ApiError, path: str, shape: ErrorShape | None, headers: Headers, last: bytes, request_id: str
) -> bytes | None:
    """Return the bytes that end an event stream with `error`; None for any other response. `headers`: headers of the response.
    `last`: last bytes of its body so far."""
    kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
    body = error.body() if shape is None else shape.body(error, request_id)
    if kind.startswith(b"application/x-ndjson"):
        return body + b"\n"
    if not kind.startswith(b"text/event-stream"):
        return None
    if path == RESPONSES or path.startswith(f"{RESPONSES}/"):
        numbers = _NUMBER.findall(last)
        number = int(numbers[-1]) + 1 if numbers else 0
        event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + dumps({**event, "sequence_number": number}) + b"\n\n"
    if shape is not None:
        return b"event: error\ndata: " + body + b"\n\n"
    return b"data: " + body + b"\n\n" + DONE
