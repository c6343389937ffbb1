"""Library: the models on this machine's disk, as far as commands and clients change them. The composition root has the one that
does it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from runtime.api import LoadProgress

Found = Mapping[str, Any]
Report = Callable[[LoadProgress], None]


class Library(Protocol):
    """Effects on the disk; each blocks. Methods raise ValueError, with a message for the person or client that caused it."""

    def pull(self, name: str, revision: str | None, report: Report, cancel: threading.Event) -> Path:
        """Download what is missing of a model, and check hashes; its folder or file."""
        ...

    def kept(self) -> Sequence[Found]:
        """Return name, bytes, path, time of modification of each model, and whether it is whole."""
        ...

    def describe(self, name: str) -> Found:
        """Return what is known of a model, and whether it is here."""
        ...

    def remove(self, name: str) -> Found:
        """Delete a model; its name and bytes."""
        ...
