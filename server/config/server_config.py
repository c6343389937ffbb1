"""ServerConfig: options that go together, as whoever serves reads them."""

from __future__ import annotations

from server.config.contradictions import contradiction
from server.config.keys import user_keys
from server.config.server_options import ConfigError, ServerOptions


class ServerConfig(ServerOptions):
    """See ServerOptions, whose fields it has and no others: made a dataclass once more, they would cost `--help` 5 ms again.

    Raises ConfigError where they contradict each other."""

    __slots__ = ()

    def __post_init__(self) -> None:
        if complaint := contradiction(self):
            raise ConfigError(complaint)

    def user_keys(self) -> tuple[str, ...]:
        """Keys of --api-key and of --api-key-file. Raises ConfigError where the file has none or cannot be read."""
        return user_keys(self)
