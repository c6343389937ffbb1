"""RankWorker: the thread that computes one rank's steps, each within the meeting that is the same step's on every other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from runtime.gpu_event import WorkerEvent
from runtime.parallel.group import Apart, HostRank
from runtime.runner.worker import Worker

T = TypeVar("T")


class RankWorker(Worker):
    def __init__(self, rank: HostRank) -> None:
        super().__init__()
        self.rank = rank

    def submit(self, work: Callable[[], None]) -> WorkerEvent:
        """See `Worker`. Every rank is given the same steps in the same order."""
        meeting = self.rank.group.claim(self.rank.number)
        return super().submit(lambda: self.rank.within(meeting, work))


async def on_every_rank(workers: Sequence[RankWorker], work: Callable[[RankWorker], T]) -> list[T]:
    """What `work` gives on each one's thread, within one meeting, in the order of the ranks. Raises what one of them raised."""

    async def of(worker: RankWorker) -> T:
        meeting = worker.rank.group.claim(worker.rank.number)
        return await worker.run(lambda: worker.rank.within(meeting, lambda: work(worker)))

    every = await asyncio.gather(*map(of, workers), return_exceptions=True)
    errors = [each for each in every if isinstance(each, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Apart))
    return [each for each in every if not isinstance(each, BaseException)]
