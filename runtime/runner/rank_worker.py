"""RankWorker: the thread that computes one rank's steps.

All ranks run the same step together. Each first receives from the previous pipeline stage, then computes, then sends to the
next stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from runtime.parallel.group import Apart, HostRank
from runtime.parallel.links import Ways
from runtime.parallel.stages import PipelineStage, RowTables
from runtime.runner.worker import Worker

T = TypeVar("T")


class RankWorker(Worker):
    """Worker thread of a rank. `ways`: links between pipeline stages; None if there is one stage. `stage`: set at start-up."""

    def __init__(self, rank: HostRank, ways: Ways | None = None) -> None:
        super().__init__()
        self.rank, self.ways = rank, ways
        self.stage: PipelineStage | None = None

    @property
    def stage_number(self) -> int:
        return 0 if self.ways is None else self.ways.number

    def has(self, tables: RowTables) -> None:
        """Set the row tables of the runner whose steps this thread computes."""
        if self.stage is not None:
            self.stage.tables = tables

    def has_gone(self) -> None:
        """Report to other ranks that this rank has ended. Their waits for it then fail with an error."""
        rank, where = self.rank, []
        if rank.size > 1:
            where.append(f"rank {rank.number} of {rank.size}")
        if self.ways is not None:
            where.append(f"stage {self.ways.number} of {self.ways.size}")
            self.ways.end(", ".join(where))
        for group in (rank.group, rank.everyone.group):
            group.end(", ".join(where))

    def of_step(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return `work` wrapped so that it runs together with the same step's work on all ranks. See `Worker.of_step`."""
        meeting, stage = self.rank.group.claim(self.rank.number), self.stage
        if stage is None:
            return lambda: self.rank.within(meeting, work)
        turn = stage.take_turn()
        return lambda: self.rank.within(meeting, lambda: stage.within(turn, work))


async def on_every_rank(workers: Sequence[RankWorker], work: Callable[[RankWorker], T]) -> list[T]:
    """Run `work` on the thread of every rank at the same time, as in a step. Return the results in rank order. If ranks raise,
    raise one of their errors."""

    async def of(worker: RankWorker) -> T:
        rank, everyone = worker.rank, worker.rank.everyone
        meeting = rank.group.claim(rank.number)
        if everyone is rank:
            return await worker.run(lambda: rank.within(meeting, lambda: work(worker)))
        of_all = everyone.group.claim(everyone.number)
        return await worker.run(lambda: everyone.within(of_all, lambda: rank.within(meeting, lambda: work(worker))))

    every = await asyncio.gather(*map(of, workers), return_exceptions=True)
    errors = [each for each in every if isinstance(each, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Apart))
    return [each for each in every if not isinstance(each, BaseException)]
