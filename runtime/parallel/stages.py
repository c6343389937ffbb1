"""Pipeline stage as computed by its thread: receives from other stages before each unit of work, and sends to them after it.

Each stage sends hidden states to the next. The last stage sends sampled ids to the stages that continue from them. All stages
run the same steps in the same order, so tensors of a link (`links.py`) need no names. If a stage fails in a step, it sends a
failure on its links, and the next stage fails in that step only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ops.transfer import index_on
from runtime.parallel.group import Apart, Gone
from runtime.parallel.links import Ways

T = TypeVar("T")
Rows = tuple[int, ...]


class StageIO(Protocol):
    """Input and output of a pipeline stage, used by its model. Tensors are [T, H] of the model's dtype. Their number is the
    same in all steps."""

    def incoming(self, num_tokens: int) -> Sequence[Tensor]:
        """Return the tensors from the previous stage, which the caller may modify."""
        ...

    def outgoing(self, tensors: Sequence[Tensor]) -> None:
        """Send `tensors` to the next stage."""
        ...


class RowTables(NamedTuple):
    """Per-row tables of a runner that persist between steps: see `runner.step_inputs.Inputs`."""

    last_ids: Tensor
    num_computed: Tensor
    draft_ids: Tensor


class Draws(NamedTuple):
    """Sampled ids of one step, which the last stage sends to other stages. `rows`: rows whose draft tokens may have been
    rejected. `takers`: numbers of the receiving stages."""

    rows: Rows
    takers: Rows


class Turn(NamedTuple):
    """Tensors to receive and send in a stage's next step. `num_tokens`: number of tokens with hidden states, or 0. `drawn`:
    `Draws.rows` of each step whose sampled ids the stage receives, in order. `draws`: sampled ids that the stage sends."""

    num_tokens: int = 0
    drawn: tuple[Rows, ...] = ()
    draws: Draws | None = None


class TakesTurns(Protocol):
    """A stage, or the proxy of a stage in another process. Set `next`, what to receive and send, before submitting work."""

    next: Turn


class PipelineStage:
    """Pipeline stage whose steps run on one thread. See `StageIO`. `tables`: row tables of its runner, set once it exists."""

    def __init__(self, ways: Ways, num_tensors: int, width: int, dtype: torch.dtype) -> None:
        self.ways = ways
        self.tables: RowTables | None = None
        self.next = Turn()
        self._shape, self._dtype = (num_tensors, width), dtype
        self._incoming: Sequence[Tensor] | None = None
        self._outgoing: Sequence[Tensor] = ()

    def take_turn(self) -> Turn:
        """Return `next`, which belongs to the work being submitted, and reset it."""
        turn, self.next = self.next, Turn()
        return turn

    def within(self, turn: Turn, work: Callable[[], T]) -> T:
        """Receive the tensors that `turn` specifies, run `work`, send tensors as `turn` specifies. Return the result of `work`."""
        behind = self.ways.behind if turn.num_tokens else None
        takers = () if turn.draws is None else turn.draws.takers
        owed = [*([] if behind is None else [behind]), *(self.ways.takers[taker] for taker in takers)]
        try:
            for rows in turn.drawn:
                with suppress(Apart):  # the sampling failed, and its rows are computed again
                    self._learn(rows)
            if turn.num_tokens and self.ways.before is not None:
                self.ways.before.take(self._place(turn.num_tokens))
            done = work()
            while owed:
                owed[0].give(self._handed_on(turn.num_tokens) if owed[0] is behind else self._drawn())
                del owed[0]
            return done
        except BaseException:
            for link in owed:
                with suppress(Gone):
                    link.leave()
            raise

    # --- StageIO -------------------------------------------------------------------------------------------------

    def incoming(self, num_tokens: int) -> Sequence[Tensor]:
        if self._incoming is None:  # a warm-up, whose results are dropped
            num_tensors, width = self._shape
            return tuple(torch.zeros((num_tensors, num_tokens, width), dtype=self._dtype))
        taken, self._incoming = self._incoming, None
        return taken

    def outgoing(self, tensors: Sequence[Tensor]) -> None:
        self._outgoing = tensors

    # --- between stages -------------------------------------------------------------------------------------------

    def _place(self, num_tokens: int) -> Sequence[Tensor]:
        """Return new tensors, into which incoming hidden states are received."""
        num_tensors, width = self._shape
        self._incoming = tuple(torch.empty((num_tensors, num_tokens, width), dtype=self._dtype))
        return self._incoming

    def _handed_on(self, num_tokens: int) -> Sequence[Tensor]:
        """Return the hidden states to send to the next stage."""
        given, self._outgoing = self._outgoing, ()
        return given

    def _drawn(self) -> RowTables:
        assert self.tables is not None
        return self.tables

    def _learn(self, rows: Rows) -> None:
        """Receive the tables of the last stage. All its ids are valid, since only that stage samples. `num_computed` is copied
        for `rows` only, because this stage may be ahead in other rows."""
        assert self.tables is not None
        assert self.ways.drawn is not None
        num_computed = torch.empty_like(self.tables.num_computed)
        self.ways.drawn.take(self.tables._replace(num_computed=num_computed))
        if rows:
            index = index_on(num_computed.device, rows)
            self.tables.num_computed[index] = num_computed[index]
