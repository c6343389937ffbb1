"""Observers: functions that count, learn or report at the loop's events. An exception in them is logged and ends no request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import ParamSpec, TypeVar

from runtime.api import Finished
from runtime.batch import ScheduledBatch
from runtime.engine.admission import Admission
from runtime.metrics.engine_meter import EngineMeter
from runtime.metrics.step_health import StepHealth
from runtime.profiling.session import Profiling
from runtime.scheduler import Scheduler
from runtime.scheduling.settling import Settled
from runtime.sequence import Sequence
from runtime.step import Step

log = logging.getLogger("oneloop.engine")

P = ParamSpec("P")
T = TypeVar("T")


class Observers:
    """Observers of the loop's events, for metrics, health, step time estimates and profiles. `when_finished`: functions that
    are called with each request that ends, except probes."""

    def __init__(
        self, scheduler: Scheduler, admission: Admission, meter: EngineMeter, health: StepHealth, profiling: Profiling
    ) -> None:
        self._scheduler = scheduler
        self._admission = admission
        self._meter = meter
        self._health = health
        self._profiling = profiling
        self._failed: set[str] = set()
        self.when_finished: list[Callable[[Finished], None]] = []

    def call(self, observe: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return `observe(*args, **kwargs)`. If it raises, log the exception and return None."""
        try:
            return observe(*args, **kwargs)
        except Exception:
            name = getattr(observe, "__qualname__", repr(observe))
            if name not in self._failed:  # it may fail in every step
                self._failed.add(name)
                log.exception("%s failed. Requests continue. Further failures of it are not logged", name)
            return None

    # --- steps ----------------------------------------------------------------------------------------------------

    def launched(self, batch: ScheduledBatch, launched_s: float) -> None:
        num_started = self.call(self._meter.launched, batch, launched_s)
        if num_started:
            self._admission.started(num_started, others_wait=bool(self._scheduler.waiting))

    def computed(self, step: Step, before_s: float, now: float) -> None:
        """Record the times of a completed `step`. `before_s`: end of the previous step. `now`: end of this step."""
        began_s = max(step.launched_s, before_s)
        self.call(self._meter.settled, step, began_s, now)
        self.call(self._health.settled, step.batch, now - began_s)
        self.call(self._scheduler.learn, step.batch, now - began_s, now - before_s)

    def settled(self, all_settled: Several[Settled], now: float) -> None:
        """Record the results of a step, before they are delivered to streams."""
        self.call(self._meter.gained, all_settled, now)

    def delivered_step(self, now: float) -> None:
        self.call(self._profiling.settled)
        self.call(self._meter.report, now)

    def deferred(self, sampling: ScheduledBatch, now: float) -> None:
        self.call(self._meter.deferred, sampling, now)

    def busy(self) -> None:
        self._meter.busy()

    def idle(self) -> None:
        self._meter.idle()

    # --- one sequence ---------------------------------------------------------------------------------------------

    def finished(self, sequence: Sequence) -> None:
        if (finished := self.call(self._meter.finished, sequence)) is not None:
            for call in self.when_finished:
                self.call(call, finished)

    def delivered(self, sequence: Sequence, held_s: float) -> None:
        """Record that the reader of `sequence` has consumed its last output. `held_s`: see `EngineTokenStream`."""
        self.call(self._meter.delivered, sequence, held_s)
