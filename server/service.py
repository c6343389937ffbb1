"""Service: what every endpoint needs, put together once by the composition root."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.config import ServerConfig
from server.lifecycle import Lifecycle
from server.metrics import HttpStats
from server.offload import Offload
from server.responses.store import ResponseStore


@dataclass(frozen=True, slots=True)
class Service:
    config: ServerConfig
    lifecycle: Lifecycle
    offload: Offload = field(default_factory=Offload)
    http_stats: HttpStats = field(default_factory=HttpStats)
    responses: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        store = ResponseStore(self.config.max_stored_responses, self.config.max_stored_bytes)
        object.__setattr__(self, "responses", store)
