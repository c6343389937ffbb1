"""FieldNames: the core's fields by the names that one API's clients know them by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from server.http.errors import InvalidRequest


class FieldNames:
    """`names`: paths of the core, and of the client. What lies below a path moves with it; what is not named stays."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = sorted(names.items(), key=lambda pair: len(pair[0]), reverse=True)  # the most exact first

    def name_of(self, field: str) -> str:
        for ours, theirs in self._names:
            if field == ours or (field.startswith(ours) and field[len(ours)] in ".["):
                return theirs + field[len(ours) :]
        return field

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """Refusals that the block raises name the client's fields."""
        try:
            yield
        except InvalidRequest as error:
            error.rename(self.name_of)
            raise
