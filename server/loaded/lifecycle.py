"""Where the server stands: loading, ready, draining or failed, and what it serves once it does.

One writer, the composition root. Handlers ask `served()` and get either everything a request needs or the answer to send
instead. Knows nothing of HTTP but that answer."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum

from runtime.api import LoadProgress
from server.config import ServerConfig
from server.errors import Unavailable
from server.loaded.model import LoadedModel

RETRY_WHILE_LOADING_S = 5
RETRY_AFTER_DRAIN_S = 10


Report = Callable[[LoadProgress], None]
Load = Callable[[ServerConfig, Report, threading.Event], Awaitable[LoadedModel]]  # the event, once set, ends a download


class LoadError(Exception):
    """The model cannot be served, and the message says why: nothing a traceback would add to."""


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Lifecycle:
    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self.progress = LoadProgress("start")
        self.reason: str | None = None  # why it failed
        self._served: LoadedModel | None = None

    def report(self, progress: LoadProgress) -> None:
        """A moment of loading; callable from any thread."""
        self.progress = progress

    def ready(self, served: LoadedModel) -> None:
        self._served = served
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def drain(self) -> None:
        self.phase = Phase.DRAINING

    def fail(self, reason: str) -> None:
        self.phase, self.reason = Phase.FAILED, reason

    @property
    def loaded(self) -> LoadedModel | None:
        """What is loaded, whether or not requests may use it."""
        return self._served

    def served(self) -> LoadedModel:
        """Raises Unavailable unless requests may enter."""
        if self.phase is Phase.READY and self._served is not None:
            return self._served
        if self.phase is Phase.FAILED:
            raise Unavailable("The model could not be loaded")
        if self.phase is Phase.DRAINING:
            raise Unavailable("The server is shutting down", retry_after_s=RETRY_AFTER_DRAIN_S)
        raise Unavailable(f"The model is still loading ({self.progress.phase})", retry_after_s=RETRY_WHILE_LOADING_S)

    def health(self) -> tuple[int, Mapping[str, object]]:
        """HTTP status and body of /health. 200 only while requests may enter and steps settle."""
        if self.phase is Phase.LOADING:
            progress = self.progress
            body = {"phase": progress.phase, "done": progress.done, "total": progress.total, "unit": progress.unit}
            return 503, {"status": "loading", **body}
        if self.phase is Phase.FAILED or self._served is None:
            return 503, {"status": "failed", "reason": self.reason}
        engine = self._served.engine.health()
        counts = {"running": engine.num_running, "waiting": engine.num_waiting}
        if not engine.ok:
            return 503, {"status": "failed", "reason": engine.reason, **counts}
        if self.phase is Phase.DRAINING:
            return 503, {"status": "draining", **counts}
        return 200, {"status": "ok", **counts}
