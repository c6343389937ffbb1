"""Fields that changed nothing: named to the client in every answer's head, and once in the log. A client that always sends the same
fields in vain is one line, not one a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlette.requests import Request

from server.config.server_config import ServerConfig
from server.http.errors import UnsupportedParameter

IGNORED_FIELDS = "ignored_fields"  # of a scope: their names, for `middleware`, which says them
MAX_SETS = 1000  # clients choose the names: beyond that it begins anew


class NotedOnce:
    def __init__(self, max_sets: int = MAX_SETS) -> None:
        self._max_sets = max_sets
        self._seen: set[frozenset[str]] = set()

    def is_new(self, names: Iterable[str]) -> bool:
        """Whether this set of names is here for the first time."""
        found = frozenset(names)
        if found in self._seen:
            return False
        if len(self._seen) >= self._max_sets:
            self._seen.clear()
        self._seen.add(found)
        return True


def note_ignored(request: Request, names: Sequence[str], config: ServerConfig) -> None:
    """Raises UnsupportedParameter where the server is strict about fields that change nothing."""
    if names and config.strict_fields:
        raise UnsupportedParameter(names[0])
    request.scope[IGNORED_FIELDS] += names
