"""NotedOnce: what the log has said already. A client that always sends the same fields in vain is one line, not one a request."""

from __future__ import annotations

from collections.abc import Iterable

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
