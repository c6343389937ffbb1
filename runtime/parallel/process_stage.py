"""ProcessStage: the one stage of a model that this process computes, where the others are computed by other processes.

Where `HostStage` leaves tensors in a passage for another thread, this one gives them to a link and takes them from one
(`links.py`); what it is told of a step's passages and draws is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from ops.transfer import index_on
from runtime.parallel.group import Gone
from runtime.parallel.links import Link, Ways
from runtime.parallel.stages import Draws, HostStage, Line, Passage, RowTables, Turn

T = TypeVar("T")


class LinkedStage(HostStage):
    """What is the same on any device: `ways` has to be set, and what is handed on to be known."""

    ways: Ways
    _owed: list[Link]

    def within(self, turn: Turn, work: Callable[[], T]) -> T:
        self._owed = []
        if turn.passage is not None and turn.passage.num_tokens and self.ways.behind is not None:
            self._owed.append(self.ways.behind)
        if turn.draws is not None:
            self._owed += [self.ways.takers[taker] for taker in turn.draws.takers]
        return super().within(turn, work)

    def _leave(self, turn: Turn) -> None:
        """A step that failed here fails there, and what is given next is the next step's."""
        for link in self._owed:
            with suppress(Gone):
                link.leave()
        super()._leave(turn)

    def room(self, num_tokens: int) -> Sequence[Tensor]:
        """Where what comes in is to be."""
        raise NotImplementedError

    def handed_on(self, num_tokens: int) -> Sequence[Tensor]:
        """What goes out, as the work has left it."""
        raise NotImplementedError

    def _receive(self, passage: Passage) -> None:
        assert self.ways.before is not None
        self.ways.before.take(self.room(passage.num_tokens))

    def _pass_on(self, passage: Passage) -> None:
        assert self.ways.behind is not None
        self._give(self.ways.behind, self.handed_on(passage.num_tokens))

    def _tell(self, draws: Draws) -> None:
        assert self.tables is not None
        for taker in draws.takers:
            self._give(self.ways.takers[taker], self.tables)

    def _give(self, link: Link, tensors: Sequence[Tensor]) -> None:
        link.give(tensors)
        self._owed.remove(link)

    def _learn(self, draws: Draws) -> None:
        assert self.tables is not None
        assert self.ways.drawn is not None
        given = RowTables(*map(torch.empty_like, self.tables))
        self.ways.drawn.take(given)
        self.tables.last_ids.copy_(given.last_ids)
        self.tables.draft_ids.copy_(given.draft_ids)
        if draws.rows:
            index = index_on(given.last_ids.device, draws.rows)
            self.tables.num_computed[index] = given.num_computed[index]


class ProcessStage(LinkedStage):
    """On a CPU."""

    def __init__(self, line: Line, number: int, num_tensors: int, width: int, dtype: torch.dtype, ways: Ways) -> None:
        super().__init__(line, number, num_tensors, width, dtype)
        self.ways, self._owed = ways, []

    def room(self, num_tokens: int) -> Sequence[Tensor]:
        num_tensors, width = self._shape
        self._incoming = tuple(torch.empty((num_tensors, num_tokens, width), dtype=self._dtype))
        return self._incoming

    def handed_on(self, num_tokens: int) -> Sequence[Tensor]:
        given, self._outgoing = self._outgoing, ()
        return given
