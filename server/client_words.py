"""ClientWords: what the core says of its own fields, in the words of the API the client speaks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from server.errors import InvalidRequest


class ClientWords:
    """`names`: the core's names of fields, and those by which the client knows them."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        longest_first = sorted(names, key=len, reverse=True)
        self._known = re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b")

    def translated(self, text: str) -> str:
        return self._known.sub(lambda found: self._names[found[0]], text)

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """Refusals that the block raises name the client's fields."""
        try:
            yield
        except InvalidRequest as error:
            error.message = self.translated(error.message)
            error.param = error.param and self.translated(error.param)
            raise
