"""Masked sampling: samples a step in which some rows have grammars.

Rows without masks, and rows whose masks are ready as soon as the logits, are sampled at once. Other rows are deferred and sampled
separately. All launches go through `MaskingEngine.enqueue`, which handles failures."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Protocol, TypeVar

from runtime.api import FinishReason
from runtime.batch import ScheduledBatch
from runtime.constrain.deferred import DeferredSampling
from runtime.constrain.mask_maker import MaskMaker
from runtime.scheduler import Scheduler
from runtime.step import ForwardOutput, Step

T = TypeVar("T")


class MaskingEngine(Protocol):
    """Methods of the engine that masked sampling needs."""

    def enqueue(self, enqueue: Callable[[], T], batch: ScheduledBatch) -> T | None:
        """Return the result of `enqueue()`. If it fails, end the requests of `batch` and return None."""
        ...

    def end(self, number: int, reason: FinishReason, error: str | None = None) -> None:
        """End sequence `number`, if it has not ended. Its stream receives `reason` and `error`."""
        ...

    def wake(self) -> None:
        """Make the engine's loop check for work. Called when the mask of a deferred row is ready."""
        ...

    def note_deferred(self, sampling: ScheduledBatch) -> None:
        """Count the rows of `sampling` as deferred because of late masks."""
        ...


class MaskedSampling:
    def __init__(self, scheduler: Scheduler, mask_maker: MaskMaker, engine: MaskingEngine) -> None:
        self._engine = engine
        self._mask_maker = mask_maker
        self._deferred = DeferredSampling(scheduler, mask_maker)

    async def sample(self, output: ForwardOutput) -> Step | None:
        """Launch the sampling of `output`, except for rows whose masks are late. All earlier steps must have completed."""
        batch = output.batch
        masked = batch.masked_rows
        await self._mask_maker.make(masked, output.done)
        late = {row.row for row in masked if not self._mask_maker.has_mask(row.number)}
        return self._sample(output, self._defer(output, batch, late) if late else batch)

    def sample_deferred(self) -> Step | None:
        """Launch the sampling of deferred rows whose masks are ready; return None if there are none."""
        ready = self._deferred.take_ready()
        return None if ready is None else self._sample(*ready)

    def _defer(self, output: ForwardOutput, batch: ScheduledBatch, late: Set[int]) -> ScheduledBatch:
        rest, sampling = batch.split(late)
        snapshot = self._engine.enqueue(lambda: output.snapshot_logits(sampling), sampling)
        if snapshot is not None:
            self._deferred.add(snapshot)
            self._engine.note_deferred(sampling)
        return rest

    def _sample(self, output: ForwardOutput, batch: ScheduledBatch) -> Step | None:
        masks, ended = self._mask_maker.take(batch.masked_rows)
        for end in ended:
            self._engine.end(end.number, end.finish, end.error)
        step = self._engine.enqueue(lambda: output.sample(batch, masks), batch)
        return None if step is None else replace(step, launched_s=output.launched_s)
