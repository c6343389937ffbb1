"""Library: operations of commands and clients on the models on this machine's disk. The composition root provides the
implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from runtime.api import LoadProgress

Found = Mapping[str, Any]
Report = Callable[[LoadProgress], None]


class Library(Protocol):
    """Operations on the disk; each blocks. Methods raise ValueError, with a message for the person or client that caused it."""

    def pull(self, name: str, revision: str | None, report: Report, cancel: threading.Event) -> Path:
        """Download the missing files of a model, and check hashes. Return its folder or file."""
        ...

    def kept(self) -> Sequence[Found]:
        """Return name, bytes, path and modification time of each model on disk, and whether it is complete."""
        ...

    def describe(self, name: str) -> Found:
        """Return the facts about a model, and whether it is on disk."""
        ...

    def remove(self, name: str) -> Found:
        """Delete a model. Return its name and bytes."""
        ...
