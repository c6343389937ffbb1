"""Deferred sampling: rows whose masks are late are not sampled with their step, but separately later.

Their logits are kept, so that nothing is computed twice, which recurrent states would not permit. Logits after draft tokens are not
kept; a row with a late mask gains one token. A sequence that ends or is preempted meanwhile is not sampled, since another sequence
may have its row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from runtime.batch import Sample, ScheduledBatch, ScheduledRow
from runtime.constrain.mask_maker import MaskMaker
from runtime.scheduler import Scheduler
from runtime.scheduling.settling import roll_back
from runtime.step import ForwardOutput


class DeferredSampling:
    def __init__(self, scheduler: Scheduler, mask_maker: MaskMaker) -> None:
        self._scheduler = scheduler
        self._mask_maker = mask_maker
        self._snapshots: list[ForwardOutput] = []

    def add(self, snapshot: ForwardOutput) -> None:
        self._snapshots.append(replace(snapshot, batch=defer(self._scheduler, snapshot.batch)))

    def take_ready(self) -> tuple[ForwardOutput, ScheduledBatch] | None:
        """Remove and return (kept logits, batch) of one step, with those of its deferred rows whose masks are ready; None if no
        mask is ready."""
        current = partial(is_current, self._scheduler)
        self._snapshots = [snapshot for snapshot in self._snapshots if any(map(current, snapshot.batch.rows))]
        for snapshot in self._snapshots:
            rows = filter(current, snapshot.batch.rows)
            ready = {row.row for row in rows if self._mask_maker.has_mask(row.number)}
            if ready:
                _, sampling = snapshot.batch.split(ready)
                resume(self._scheduler, sampling)
                return snapshot, sampling
        return None


def defer(scheduler: Scheduler, sampling: ScheduledBatch) -> ScheduledBatch:
    """Mark the rows of `sampling`, a part of a step, as deferred. Their sequences are not scheduled until they are sampled. Return
    the batch to sample later, without draft tokens."""
    rows = []
    for row in sampling.rows:
        sequence, work = scheduler.sequences.find(row.number), row.work
        if sequence is None:
            continue
        assert type(work) is Sample
        sequence.num_in_flight -= work.num_ids
        if work.num_ids > 1:
            roll_back(sequence, work.num_ids - 1)
        rows.append(row.without_extra(sequence.num_computed_tokens, sequence.work))
    return replace(sampling, rows=tuple(rows))


def is_current(scheduler: Scheduler, row: ScheduledRow) -> bool:
    """Return whether a deferred row may still be sampled. It may not if its sequence has ended or was preempted."""
    sequence = scheduler.sequences.find(row.number)
    return (
        sequence is not None
        and sequence.row == row.row
        and row.end == sequence.num_computed_tokens == sequence.num_tokens
    )


def resume(scheduler: Scheduler, sampling: ScheduledBatch) -> None:
    """Count the samples of `sampling` as in flight. Called when the deferred batch is launched."""
    for row in sampling.rows:
        if (sequence := scheduler.sequences.find(row.number)) is not None:
            sequence.num_in_flight += 1
