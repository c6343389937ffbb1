"""Library: operations on the models on this machine's disk, implemented by the code that starts the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from runtime.api import LoadProgress

Found = Mapping[str, Any]
Report = Callable[[LoadProgress], None]


class Library(Protocol):
    """Operations on the models on disk. Every method blocks, and raises ValueError with a message for the user or client."""

    def pull(self, name: str, revision: str | None, report: Report, cancel: threading.Event) -> Path:
        """Download the missing files of a model, and check hashes. Return the path of its folder or file. `report`: receives the
        progress. `cancel`: stops the download when set."""
        ...

    def kept(self) -> Sequence[Found]:
        """Return name, size in bytes, path and modification time of each model on disk, and whether its files are complete."""
        ...

    def describe(self, name: str) -> Found:
        """Return the facts about the model `name`, and whether it is on disk."""
        ...

    def remove(self, name: str) -> Found:
        """Delete the model `name` from disk. Return its name and its size in bytes."""
        ...
