"""What a request's head says to whoever answers: its id, since when and how long its client waits, whose prefixes it may reuse."""

from __future__ import annotations

import re
import uuid

from starlette.types import Scope

from server.http.arrival import Arrival
from server.http.auth import tenant
from server.http.errors import InvalidRequest
from server.http.schema import MAX_TIMEOUT_S, REQUEST_ID

_REQUEST_ID = re.compile(REQUEST_ID)
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)


def request_id(scope: Scope) -> str:
    """The client's X-Request-Id where it is one, else what its body says (`body`), else a fresh id."""
    found: str = scope["request_id"]
    return found


def arrival(scope: Scope) -> Arrival:
    """Of a request whose head has arrived and whose key has been checked. Raises InvalidRequest."""
    return Arrival(scope["arrival_s"], _timeout_s(scope), tenant(scope), scope["request_id"])


def _timeout_s(scope: Scope) -> float | None:
    """What X-Request-Timeout says. Raises InvalidRequest where that is no number of seconds."""
    for name, value in scope["headers"]:
        if name == b"x-request-timeout":
            text = value.decode("latin-1").strip()
            if not _SECONDS.fullmatch(text) or not 0 < float(text) <= MAX_TIMEOUT_S:
                raise InvalidRequest(
                    f"X-Request-Timeout is seconds, more than 0 and at most {MAX_TIMEOUT_S}", param="X-Request-Timeout"
                )
            return float(text)
    return None


def choose_id(scope: Scope) -> str:
    """What X-Request-Id says, or a fresh one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if _REQUEST_ID.fullmatch(text) else uuid.uuid4().hex
    return uuid.uuid4().hex
