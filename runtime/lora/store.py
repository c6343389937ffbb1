"""AdapterStore: adapters in host memory, read from their folders, checked, and converted to the format of the model's layers.

Reading runs on threads, releasing on the event loop. A folder must still have the same content when it is read again,
because cached prefix blocks and running sequences depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from runtime.lora.peft_folder import Fingerprint, read_adapter
from runtime.lora.targets import Targets
from runtime.models.adapters import ModelAdapters
from runtime.weights.rules import WeightsError


class AdapterFacts(NamedTuple):
    base: str
    max_rank: int
    num_parameters: int


class AdapterStore:
    """Adapters in host memory. `rooms`: adapter storage of the model, or of each of its shards, all with the same adapters."""

    def __init__(self, rooms: Sequence[ModelAdapters], targets: Targets, max_rank: int) -> None:
        self._rooms = rooms
        self._targets, self._max_rank = targets, max_rank
        self._fingerprints: dict[int, Fingerprint] = {}

    def read(self, key: int, path: str) -> AdapterFacts:
        """Load an adapter into memory as `key`; without a model, only check that it can be loaded. Thread-safe.

        Raises WeightsError if the adapter cannot be served or its files have changed."""
        folder = Path(path)
        found = Fingerprint.of(folder)
        if self._fingerprints.setdefault(key, found) != found:
            raise WeightsError(f"{folder}: the files have changed since the adapter was loaded: load it again")
        weights = read_adapter(folder, self._targets, self._max_rank)
        for room, prepared in [(room, room.prepared(weights.parts)) for room in self._rooms]:
            room.keep(key, prepared)
        return AdapterFacts(weights.config.base, weights.max_rank, weights.num_parameters)

    def drop(self, key: int) -> None:
        """Remove the adapter from host memory. Its copy in a slot stays until the slot is reused."""
        for room in self._rooms:
            room.drop(key)

    def has(self, key: int) -> bool:
        """Return whether the adapter is in memory."""
        return bool(self._rooms) and all(room.has(key) for room in self._rooms)

    def leave(self) -> None:
        """Drop the model, and with it all adapters in memory."""
        self._rooms = ()

    def enter(self, fresh: AdapterStore) -> None:
        """Use the storage of the rebuilt model, for which `fresh` was created."""
        self._rooms = fresh._rooms

    def forget(self, key: int) -> None:
        """Remove an adapter that is no longer requested."""
        self.drop(key)
        self._fingerprints.pop(key, None)
