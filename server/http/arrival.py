"""What is known of a request before its body is read: when it came, how long its client waits, and who asks."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

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
