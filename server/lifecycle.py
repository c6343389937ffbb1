"""Where the server stands: loading, ready, draining or failed, and what it serves once it does.

One writer, the composition root. Handlers ask `served()` and get either everything a request needs or the answer to send
instead. Knows nothing of HTTP but that answer."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from enum import StrEnum

from runtime.api import EngineClient, LoadProgress, ModelInfo
from server import __version__
from server.chat_format import ChatFormat
from server.errors import Unavailable
from server.prompt import ChatTemplate
from server.sampling import SamplingDefaults
from server.structured.compiler import Grammars
from server.tokenizer import Tokenizer

RETRY_WHILE_LOADING_S = 5
RETRY_AFTER_DRAIN_S = 10


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model with all that turns text into its ids and back. `names`: what clients call it, first the one in answers."""

    engine: EngineClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    defaults: SamplingDefaults
    names: tuple[str, ...]
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    warm_grammars: InitVar[Grammars | None] = None  # those that have been made ready while the engine was
    grammars: Grammars = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self, warm_grammars: Grammars | None) -> None:
        grammars = warm_grammars or Grammars(self.tokenizer, self.engine.model.eos_token_ids)
        object.__setattr__(self, "grammars", grammars)
        object.__setattr__(self, "fingerprint", _fingerprint(self.name, self.engine.model))

    @property
    def name(self) -> str:
        return self.names[0]


def _fingerprint(name: str, model: ModelInfo) -> str:
    """Changes with what may change an answer: the version, the model, its type and device."""
    facts = (name, model.architecture, model.num_parameters, model.dtype, model.device)
    return f"oneloop-{__version__}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


class Lifecycle:
    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self.progress = LoadProgress("start")
        self.reason: str | None = None  # why it failed
        self._served: Served | None = None

    def report(self, progress: LoadProgress) -> None:
        """A moment of loading; callable from any thread."""
        self.progress = progress

    def ready(self, served: Served) -> None:
        self._served = served
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def drain(self) -> None:
        self.phase = Phase.DRAINING

    def fail(self, reason: str) -> None:
        self.phase, self.reason = Phase.FAILED, reason

    @property
    def loaded(self) -> Served | None:
        """What is loaded, whether or not requests may use it."""
        return self._served

    def served(self) -> Served:
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
