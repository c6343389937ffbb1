"""Service: what every endpoint needs, put together once by the composition root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from server.config.server_config import ServerConfig
from server.http.metrics import HttpStats
from server.http.offload import Offload
from server.models.lifecycle import Lifecycle
from server.models.probe import TokenProbe

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    config: ServerConfig
    lifecycle: Lifecycle
    offload: Offload = field(default_factory=Offload)
    http_stats: HttpStats = field(default_factory=HttpStats)
    token_probe: TokenProbe = field(default_factory=TokenProbe)
    _parts: dict[Callable[..., Any], Any] = field(default_factory=dict)

    def part(self, make: Callable[[ServerConfig], T]) -> T:
        """What `make` makes of the configuration: once, the first time an endpoint needs it."""
        if make not in self._parts:
            self._parts[make] = make(self.config)
        return cast("T", self._parts[make])

    def add_part(self, kind: type[T], part: T) -> None:
        """`part` needs more than the configuration, and is made by who builds the application."""
        self._parts[kind] = part

    def added_part(self, kind: type[T]) -> T | None:
        return self._parts.get(kind)
