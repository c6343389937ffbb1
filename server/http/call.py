"""What is known of a request: when it came, how long its client waits, who sent it, and which of its fields had no effect."""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from starlette.requests import Request
from starlette.types import Scope

from server.config.server_config import ServerConfig
from server.http.errors import InvalidRequest, UnsupportedParameter
from server.http.schema import MAX_TIMEOUT_S, REQUEST_ID

# Who asks, for all that is shared among callers: the engine's queue, threads for text and for grammars. Opaque; None where
# nobody is told from others. It goes with the context, since much work on a request's way is done by what knows no requests.
CALLER: ContextVar[bytes | None] = ContextVar("caller", default=None)

# Whose key it came with, where what is kept of one's requests may tell nothing to another; None where that is everybody.
TENANT: ContextVar[str | None] = ContextVar("tenant", default=None)

# Of which trace the request is a part, by the W3C's headers; none where nobody traces. The same way.
TRACE_HEADERS: ContextVar[Sequence[tuple[str, str]]] = ContextVar("trace_headers", default=())

# The id of the request that is worked on, as its client and the log have it; None where there is none. The same way.
CURRENT_ID: ContextVar[str | None] = ContextVar("request_id", default=None)


@dataclass(frozen=True, slots=True)
class Arrival:
    """`time_s`: by `time.monotonic()`. `tenant`: whose prefixes it may reuse and nobody else's; None where that is everybody.
    `timeout_s`: from `time_s` on, for the whole answer, if the client said so in a header. `request_id`: by which client and log
    know it; empty where it came by no connection."""

    time_s: float
    timeout_s: float | None = None
    tenant: str | None = None
    request_id: str = ""

    def deadline_s(self, body_s: float | None, otherwise_s: float | None) -> float | None:
        """Until when an answer has to be complete, by `time.monotonic()`. `body_s`: what the body says; of body and head the
        shorter counts, `otherwise_s` only where neither says anything. None: there is no limit."""
        given = [each for each in (body_s, self.timeout_s) if each is not None]
        shortest = min(given, default=otherwise_s)
        return None if shortest is None else self.time_s + shortest


UNIX_SOCKET = b"unix"
_REQUEST_ID = re.compile(REQUEST_ID)
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)


def caller_key(scope: Scope) -> bytes | None:
    """What stands for the user's key a request came with; None where there are none."""
    found: bytes | None = scope.get("caller_key")
    return found


def is_admin(scope: Scope) -> bool:
    """Whether a request came with the administrator's key."""
    return bool(scope.get("is_admin"))


def caller(scope: Scope) -> bytes | None:
    """Who asks, for whatever is shared among callers: the key; where there are none the client's address, of IPv6 its network of 64
    bits; over a Unix socket all are one. scope["caller"], where what makes the request says so; None where that says nothing."""
    if (found := scope.get("caller")) is not None:
        return bytes(found)
    if is_admin(scope):
        return b"administrator"
    if (key := caller_key(scope)) is not None:
        return key
    if "client" not in scope:
        return None  # a program of ours asks
    return _network((scope["client"] or ("",))[0])


def note_caller(scope: Scope) -> bytes | None:
    """`caller`, which whatever is done for this request from here on knows too, as it does whose key it came with."""
    TENANT.set(tenant(scope))
    CALLER.set(found := caller(scope))
    return found


@lru_cache(1024)  # every connection has one, few are new
def _network(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return UNIX_SOCKET
    return address.packed[:8] if address.version == 6 and address.ipv4_mapped is None else address.packed[-4:]


def tenant(scope: Scope) -> str | None:
    """Whose key a request came with, as text that means nothing to anybody; None where there are no keys."""
    if is_admin(scope):
        return "administrator"
    key = caller_key(scope)
    return None if key is None else key.hex()


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


IGNORED_FIELDS = "ignored_fields"  # of a scope: their names, for `middleware`, which says them


def note_ignored(request: Request, names: Sequence[str], config: ServerConfig) -> None:
    """Raises UnsupportedParameter where the server is strict about fields that change nothing."""
    if names and config.strict_fields:
        raise UnsupportedParameter(names[0])
    request.scope[IGNORED_FIELDS] += names
