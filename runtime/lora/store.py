"""AdapterStore: adapters in host memory. It reads folders, checks them, and converts the matrices to the model's layer format.

Reading runs on threads, releasing on the event loop. When a folder is read again, its files must be unchanged, because cached
prefix blocks and running sequences depend on them."""

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
    """Adapters in host memory. `rooms`: adapter storage of each shard of the model; all contain the same adapters."""

    def __init__(self, rooms: Sequence[ModelAdapters], targets: Targets, max_rank: int) -> None:
        self._rooms = rooms
        self._targets, self._max_rank = targets, max_rank
        self._fingerprints: dict[int, Fingerprint] = {}

    def read(self, key: int, path: str) -> AdapterFacts:
        """Load the adapter in folder `path` into memory as `key`. Without a model, only check that it can be loaded. Thread-safe.

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
        """Remove adapter `key` from host memory. Its copy in a device slot stays until the slot is reused."""
        for room in self._rooms:
            room.drop(key)

    def has(self, key: int) -> bool:
        return bool(self._rooms) and all(room.has(key) for room in self._rooms)

    def leave(self) -> None:
        self._rooms = ()

    def enter(self, fresh: AdapterStore) -> None:
        """Use the storage of a rebuilt model. `fresh`: the store that was created for it."""
        self._rooms = fresh._rooms

    def forget(self, key: int) -> None:
        self.drop(key)
        self._fingerprints.pop(key, None)
