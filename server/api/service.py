"""Service: the objects that route handlers use, created once at start-up."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.api.response_store import ResponseStore
from server.batches.folder import BatchFolder
from server.batches.runner import BatchRunner
from server.config.server_config import ServerConfig
from server.generate.speech.stats import SpeechStats
from server.http.metrics import HttpStats
from server.http.offload import Offload
from server.http.websocket import OpenSockets
from server.models.dashboard import Feed, RecentTexts
from server.models.library import Library
from server.models.lifecycle import Lifecycle, TokenProbe


@dataclass(eq=False, slots=True)
class Service:
    """Objects that route handlers use. None without --batch-dir: `batch_folder`, `batches`. None without --log-requests:
    `texts`. None without --enable-model-management: `library`, the models on the local disk. `feed`: None if no routes are
    served."""

    config: ServerConfig
    lifecycle: Lifecycle
    offload: Offload = field(default_factory=Offload)
    http_stats: HttpStats = field(default_factory=HttpStats)
    token_probe: TokenProbe = field(default_factory=TokenProbe)
    batch_folder: BatchFolder | None = None
    batches: BatchRunner | None = None
    texts: RecentTexts | None = None
    feed: Feed | None = None
    library: Library | None = None
    speech_stats: SpeechStats = field(default_factory=SpeechStats)
    sockets: OpenSockets = field(default_factory=OpenSockets)
    responses: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.config.max_stored_responses, self.config.max_stored_bytes)
        self.http_stats.sources += [self.speech_stats.metrics, self.sockets.metrics]
