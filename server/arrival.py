"""Arrival: what is known of a request before its body is read. When it came, from whom, and how long its client waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """`time_s`: by `time.monotonic()`. `caller`: who shares with others, opaque; None where nobody is told from others.
    `tenant`: whose prefixes it may reuse and nobody else's; None where that is everybody.
    `timeout_s`: from `time_s` on, for the whole answer, if the client said so in a header."""

    time_s: float
    caller: bytes | None = None
    timeout_s: float | None = None
    tenant: str | None = None
