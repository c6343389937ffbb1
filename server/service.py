"""Service: what every endpoint needs, put together once by the composition root."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.config import ServerConfig
from server.http.metrics import HttpStats
from server.loaded.lifecycle import Lifecycle
from server.offload import Offload


@dataclass(frozen=True, slots=True)
class Service:
    config: ServerConfig
    lifecycle: Lifecycle
    offload: Offload = field(default_factory=Offload)
    http_stats: HttpStats = field(default_factory=HttpStats)
