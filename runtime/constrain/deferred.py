"""Deferred sampling: rows left out of their step's sampling, since their masks were late, until they can be sampled by themselves.

Their logits are kept, so nothing is computed twice: the state of a recurrent layer could not take it. But those behind drafts
are not: a row whose masks are late gains one token. One that ends or is preempted meanwhile is not sampled: by then its place
in the device tables may be another's."""

from __future__ import annotations

from dataclasses import replace

from runtime.batch import ScheduledBatch
from runtime.constrain.mask_maker import MaskMaker
from runtime.scheduler import Scheduler
from runtime.step import ForwardOutput


class DeferredSampling:
    def __init__(self, scheduler: Scheduler, mask_maker: MaskMaker) -> None:
        self._scheduler = scheduler
        self._mask_maker = mask_maker
        self._snapshots: list[ForwardOutput] = []

    def add(self, snapshot: ForwardOutput) -> None:
        self._snapshots.append(replace(snapshot, batch=self._scheduler.defer(snapshot.batch)))

    def take_ready(self) -> tuple[ForwardOutput, ScheduledBatch] | None:
        """Take those rows of one step whose masks have come, to be sampled now."""
        is_current = self._scheduler.is_current
        self._snapshots = [snapshot for snapshot in self._snapshots if any(map(is_current, snapshot.batch.rows))]
        for snapshot in self._snapshots:
            rows = filter(is_current, snapshot.batch.rows)
            ready = {row.row for row in rows if self._mask_maker.has_mask(row.number)}
            if ready:
                _, sampling = snapshot.batch.split(ready)
                self._scheduler.resume(sampling)
                return snapshot, sampling
        return None
