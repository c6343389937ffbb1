"""Terms: what of a request is about the engine and not about the answer: until when, in whose prefix cache, how urgent."""

from __future__ import annotations

from typing import NamedTuple, Self

from server.config.server_config import ServerConfig
from server.http.call import Arrival
from server.http.errors import Field, InvalidRequest

PRIORITY = Field("priority")


class Terms(NamedTuple):
    """`deadline_s`: by `time.monotonic()`; None: there is none. `cache_salt`: who has another one shares no prefixes with it."""

    priority: int
    deadline_s: float | None
    cache_salt: str | None

    @classmethod
    def of(
        cls, config: ServerConfig, arrival: Arrival, *, priority: int, timeout_s: float | None, cache_salt: str | None
    ) -> Self:
        """The terms of a request that came as `arrival` says. `timeout_s`: the body's. `cache_salt`: the client's;
        clients divide what is theirs by their own salts, in which there is no slash.

        Raises InvalidRequest where the scheduler knows no priorities."""
        if priority and config.scheduling_policy != "priority":
            raise InvalidRequest(PRIORITY, " needs a server started with --scheduling-policy priority", param=PRIORITY)
        is_shared = arrival.tenant is None or config.shared_prefix_cache
        salt = cache_salt if is_shared else f"{arrival.tenant}/{cache_salt or ''}"
        return cls(priority, arrival.deadline_s(timeout_s, config.request_timeout), salt)
