"""Texts: what the last requests asked and were answered, as ids, for who looks at a request. Only where an operator wants it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from runtime.api import Finished
from server.models.model import LoadedModel

MAX_REQUESTS = 512  # as many as the engine remembers
MAX_TOKENS = 1_000_000  # of all together; the oldest go


class TokenIds(NamedTuple):
    model: LoadedModel
    prompt: Sequence[int]
    answer: Sequence[int]

    @property
    def num(self) -> int:
        return len(self.prompt) + len(self.answer)


class Texts:
    def __init__(self) -> None:
        self._by_id: dict[str, TokenIds] = {}  # the oldest first
        self._num_tokens = 0

    def watch(self, loaded: LoadedModel) -> None:
        """Keep those that it is asked from now on."""
        loaded.engine.when_finished(partial(self.note, loaded))

    def note(self, loaded: LoadedModel, finished: Finished) -> None:
        """A request of it has ended."""
        id = finished.request.id
        self._forget(id)
        self._by_id[id] = ids = TokenIds(loaded, finished.request.prompt_ids, finished.output_ids)
        self._num_tokens += ids.num
        while len(self._by_id) > MAX_REQUESTS or self._num_tokens > MAX_TOKENS:
            self._forget(next(iter(self._by_id)))

    def find(self, id: str) -> TokenIds | None:
        return self._by_id.get(id)

    def _forget(self, id: str) -> None:
        if (ids := self._by_id.pop(id, None)) is not None:
            self._num_tokens -= ids.num
