"""Stages: what the stages of one step hand on to each other, when each computes on a host thread of its own.

Hidden states go from each stage to the next (`Passage`); what the last one has drawn goes back to those that go on from there
(`Draws`). Every stage is given the same steps in the same order, and waits within a step for what it lacks of it, so stages are
as many steps apart as are under way. A stage that fails leaves its passage, and the next one fails with it; the passages of other
steps know nothing of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from runtime.parallel.group import Apart, Gone

T = TypeVar("T")


class Handover(Protocol):
    """A stage as its model knows it. Tensors are [T, H] each, of the model's dtype, their number the same in all steps."""

    def incoming(self, num_tokens: int) -> Sequence[Tensor]:
        """What the stage before has handed on; the caller's to write to."""
        ...

    def outgoing(self, tensors: Sequence[Tensor]) -> None:
        """Hand these on."""
        ...


class RowTables(NamedTuple):
    """What a runner keeps of rows from step to step: `runner.step_inputs.Inputs` says what."""

    last_ids: Tensor
    num_computed: Tensor
    draft_ids: Tensor


class _Given:
    """What one stage gives each of several others, once."""

    def __init__(self, num: int) -> None:
        self._given: list[Future[Any]] = [Future() for _ in range(num)]

    def give(self, to: int, what: Any) -> None:
        with suppress(InvalidStateError):  # it has been left
            self._given[to].set_result(what)

    def take(self, to: int) -> Any:
        """Waits. Raises Apart."""
        return self._given[to].result()

    def leave(self, gone: Gone | None = None) -> None:
        """Nobody waits here any more: what has not been given will not be, since a stage has failed, or is `gone` for good."""
        for each in self._given:
            with suppress(InvalidStateError):
                each.set_exception(gone or Apart("another stage has failed in this step"))


class Passage(_Given):
    """What goes from stage to stage in a step of `num_tokens`: stage s takes what s - 1 gives."""

    def __init__(self, num_tokens: int, num_stages: int) -> None:
        super().__init__(num_stages)
        self.num_tokens = num_tokens


class Draws(_Given):
    """What the sampling of a step has left in the tables of the last stage. `rows`: those that had guesses, of which some may have
    been refused; `takers`: the stages that are given it."""

    def __init__(self, rows: tuple[int, ...], takers: Sequence[int], num_stages: int) -> None:
        super().__init__(num_stages)
        self.rows, self.takers = rows, takers


class Turn(NamedTuple):
    """What a stage's next piece of work takes and gives. `drawn`: what it has to know, in the order in which it was drawn; `draws`:
    what it draws."""

    passage: Passage | None = None
    drawn: tuple[Draws, ...] = ()
    draws: Draws | None = None

    def leave(self) -> None:
        for each in (self.passage, self.draws):
            if each is not None:
                each.leave()


class TakesTurns(Protocol):
    """Whoever computes a stage, or hands on to who does. `next`: set by who launches, just before a piece of work is submitted."""

    next: Turn


class Line:
    """Of each of `size` stages the device that hands on to that of the next one: with shards of every layer, that of the same
    rank."""

    def __init__(self, size: int) -> None:
        """`stages`: its stages by number, as far as they are there. `slots`: by stage, room for what it is handed that is free."""
        self.size = size
        self.stages: dict[int, HostStage] = {}
        self.slots: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(size)]
        self._lock = Lock()
        self._ended: Gone | None = None
        self._under_way: WeakSet[_Given] = WeakSet()

    def passage(self, num_tokens: int) -> Passage:
        return self._opened(Passage(num_tokens, self.size))

    def draws(self, rows: tuple[int, ...], takers: Sequence[int]) -> Draws:
        return self._opened(Draws(rows, takers, self.size))

    def _opened(self, given: T) -> T:
        with self._lock:
            assert isinstance(given, _Given)
            self._under_way.add(given)
            if self._ended is not None:
                given.leave(self._ended)
            return given

    def slot(self, number: int) -> Any:
        """One of `slots`. Waits. Raises Apart."""
        slot = self.slots[number].get()
        if slot is None:
            self.slots[number].put(None)
            raise self._ended or Gone()
        return slot

    def end(self, where: str = "") -> None:
        """A stage has gone for good: whoever waits for it, and whoever would, fails. `where`: which, if it is known."""
        with self._lock:
            self._ended = self._ended or Gone(where)
            for each in list(self._under_way):
                each.leave(self._ended)
        for slots in self.slots:
            slots.put(None)


class HostStage:
    """Stage `number` of a line, whose steps run on one thread; tensors are handed on as they are. See `Handover`.

    `tables`: those of its runner, set when there is one; `next`: set by who launches, just before a piece of work is submitted."""

    def __init__(self, line: Line, number: int, num_tensors: int, width: int, dtype: torch.dtype) -> None:
        self.line, self.number = line, number
        self.tables: RowTables | None = None
        self.next = Turn()
        self._shape, self._dtype = (num_tensors, width), dtype
        self._incoming: Sequence[Tensor] | None = None
        self._outgoing: Sequence[Tensor] = ()

    @property
    def is_last(self) -> bool:
        return self.number == self.line.size - 1

    def take_turn(self) -> Turn:
        """That of the work which is submitted now."""
        turn, self.next = self.next, Turn()
        return turn

    def within(self, turn: Turn, work: Callable[[], T]) -> T:
        """Run a piece of work that takes and gives what `turn` says."""
        try:
            for draws in turn.drawn:
                with suppress(Apart):  # its sampling has failed: whoever goes on from there is computed anew
                    self._learn(draws)
            passage = turn.passage if turn.passage is not None and turn.passage.num_tokens else None
            if passage is not None and self.number:
                self._receive(passage)
            done = work()
            if passage is not None and not self.is_last:
                self._pass_on(passage)
            if turn.draws is not None:
                self._tell(turn.draws)
            return done
        except BaseException:
            self._leave(turn)
            raise

    def _leave(self, turn: Turn) -> None:
        """Nobody is left waiting for what a piece of work was to give."""
        turn.leave()

    # --- Handover -------------------------------------------------------------------------------------------------

    def incoming(self, num_tokens: int) -> Sequence[Tensor]:
        if self._incoming is None:  # what is computed now is of no use to anybody
            num_tensors, width = self._shape
            return tuple(torch.zeros((num_tensors, num_tokens, width), dtype=self._dtype))
        taken, self._incoming = self._incoming, None
        return taken

    def outgoing(self, tensors: Sequence[Tensor]) -> None:
        self._outgoing = tensors

    # --- between stages -------------------------------------------------------------------------------------------

    def _receive(self, passage: Passage) -> None:
        self._incoming = passage.take(self.number)

    def _pass_on(self, passage: Passage) -> None:
        given, self._outgoing = self._outgoing, ()
        passage.give(self.number + 1, given)

    def _tell(self, draws: Draws) -> None:
        assert self.tables is not None
        for stage in draws.takers:
            draws.give(stage, RowTables(*(table.clone() for table in self.tables)))

    def _learn(self, draws: Draws) -> None:
        """The last stage alone draws, so all its last ids are right; but how far a row is, this stage may know better by now."""
        given = draws.take(self.number)
        assert self.tables is not None
        self.tables.last_ids.copy_(given.last_ids)
        self.tables.draft_ids.copy_(given.draft_ids)
        if draws.rows:
            index = torch.tensor(draws.rows)
            self.tables.num_computed[index] = given.num_computed[index]
