"""PrefixRouter: request router of Ray Serve that uses `prefixes.choose`.

Each ingress has its own router. A request without prefixes goes to the less busy of two random replicas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from server.ray.exchange import Forwarded
from server.ray.prefixes import Homes, choose


class PrefixRouter(RequestRouter):
    def initialize_state(self, spare: float = 8.0) -> None:
        """Set the router's parameters. `spare`: see `prefixes.choose`."""
        self._homes = Homes()
        self._spare = spare

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Serve's default after a first try in vain; without it, one that finds all replicas full would try again at once.
            pending_request.routing_context.should_backoff = True
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        known = self.replica_queue_len_cache
        ongoing = {name: known.get(each.replica_id) or 0 for name, each in by_name.items()}
        home = self._homes.find(_prefixes(pending_request), ongoing)
        return [[by_name[name] for name in rank] for rank in choose(home, ongoing, self._spare, _two_of)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        self._homes.note(_prefixes(pending_request), replica_id.unique_id)


def _two_of(names: Sequence[str]) -> list[str]:
    return random.sample(names, min(2, len(names)))


def _prefixes(request: PendingRequest | None) -> tuple[bytes, ...]:
    first = request.args[0] if request is not None and request.args else None
    return first.prefixes if isinstance(first, Forwarded) else ()
