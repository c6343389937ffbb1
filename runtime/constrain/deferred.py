"""Held draws: rows left out of their step's draw, since their masks were late, until they can be drawn by themselves.

What was computed for them is kept, so nothing is computed twice: the state of a recurrent layer could not take it. A row that ends
or is preempted meanwhile is not drawn: by then its place in the device tables may be another's."""

from __future__ import annotations

from runtime.batch import ScheduledBatch
from runtime.constrain.constraints import Constraints
from runtime.scheduler import Scheduler
from runtime.step import ForwardPass


class HeldDraws:
    def __init__(self, scheduler: Scheduler, constraints: Constraints) -> None:
        self._scheduler = scheduler
        self._constraints = constraints
        self._kept: list[ForwardPass] = []

    def add(self, kept: ForwardPass) -> None:
        self._scheduler.hold(kept.batch)
        self._kept.append(kept)

    def take_ready(self) -> tuple[ForwardPass, ScheduledBatch] | None:
        """Draws of one step whose masks have come, to be launched now."""
        self._kept = [kept for kept in self._kept if any(map(self._scheduler.holds, kept.batch.rows))]
        for kept in self._kept:
            rows = filter(self._scheduler.holds, kept.batch.rows)
            ready = {row.row for row in rows if self._constraints.has_mask(row.sequence)}
            if ready:
                _, draws = kept.batch.split(ready)
                self._scheduler.resume(draws)
                return kept, draws
        return None
