"""Loop: the engine's task, which schedules steps, launches them and delivers their results. It contains no tensors or text.

Up to `steps_in_flight` steps are launched before their results are read: while one runs, the next is scheduled and launched.
Request handlers run while the loop waits. An idle loop blocks on one event and uses no CPU.

Steps with masked rows differ, because a mask depends on the previous sampled token. Their forward pass is launched early, but
sampling starts only when the results of all earlier steps are on the host. Nothing is launched between the two. If a row's mask
takes longer than the forward pass, the row is sampled separately later, and left out of steps until then. No other row waits
for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from runtime.api import FinishReason, TokenLogprobs
from runtime.batch import ScheduledBatch
from runtime.constrain.mask_maker import MaskMaker
from runtime.constrain.masked_sampling import MaskedSampling
from runtime.engine.deadlines import RequestDeadlines
from runtime.engine.faults import DeviceLost, Faults
from runtime.engine.observers import Observers
from runtime.engine.open_requests import OpenRequests
from runtime.engine.probes import Probes
from runtime.engine.sleeping import Sleeping, SleepingRunner
from runtime.scheduler import Scheduler
from runtime.step import ForwardOutput, Runner, Step, StepResult

log = logging.getLogger("oneloop.engine")

T = TypeVar("T")


class Loop:
    """Task that runs the engine's steps. Implements `Door`. `work`: event that is set when there may be work."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, requests: OpenRequests, work: asyncio.Event, *, mask_maker: MaskMaker,
        observers: Observers, faults: Faults, deadlines: RequestDeadlines, probes: Probes, sleeping: Sleeping, steps_in_flight: int,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.runner = runner
        self.in_flight: deque[Step] = deque()
        self.unsampled: ForwardOutput | None = None
        self.last_settled_s = 0.0
        self.idle = asyncio.Event()
        self.idle.set()
        self._scheduler = scheduler
        self._requests = requests
        self._masked = MaskedSampling(scheduler, mask_maker, self)
        self._observers = observers
        self._faults = faults
        self._deadlines = deadlines
        self._probes = probes
        self._sleeping = sleeping
        self._steps_in_flight = steps_in_flight
        self._clock = clock
        self._work = work
        self._rested = asyncio.Event()
        self._closing = False
        self._task = asyncio.create_task(self._live(), name="engine")

    def begin(self) -> None:
        """Start the loop's work because requests were added."""
        self.idle.clear()
        self._work.set()

    async def close(self, limit_s: float) -> bool:
        """End the loop when no request is open, or cancel it after `limit_s` seconds. Return False if it was cancelled."""
        self._closing = True
        self._work.set()
        ended, _ = await asyncio.wait({self._task}, timeout=limit_s)
        if not ended:
            self._task.cancel()
            await asyncio.wait({self._task})
        return bool(ended)

    async def _live(self) -> None:
        try:
            await self._run()
        except Exception as error:
            if not isinstance(
                error, DeviceLost
            ):  # a bug of the engine, not of a request: report it instead of letting requests wait
                log.exception("the engine loop died")
            self._faults.die(error)
            self.idle.set()
        finally:
            self._observers.idle()
            self._sleeping.close()
            for feature in self._scheduler.features:
                feature.close()

    # --- the loop -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while await self._wait_for_work():
            self._faults.check()
            self._deadlines.end_due()
            if self._sleeping.level and not await self._wake_up():
                continue
            await self._let_come()
            launched = self._launched(self._masked.sample_deferred()) or await self._launch_next()
            if (captured := self.runner.capture_next(idle=False)) is not None:
                await captured
            if self.in_flight and (not launched or len(self.in_flight) >= self._steps_in_flight):
                await self._settle_oldest()
            elif not launched and self._requests:
                self._work.clear()
                await self._work.wait()  # until a late mask is ready or a request arrives

    async def _wait_for_work(self) -> bool:
        """Wait until a step can be scheduled or its results read. Return False if the loop is closing and has no work."""
        if not self._requests and not self.in_flight:
            self._observers.idle()
            self._deadlines.clear()
            self._probes.idle()
            self.idle.set()
            if not self._closing:
                self._work.clear()
                await self._sleeping.rest(self._take_runner)
                await self._capture_while_idle()
                await self._work.wait()
                self._sleeping.stop_waiting()
                self._observers.busy()
        return bool(self._requests or self.in_flight or not self._closing)

    async def _let_come(self) -> None:
        """Delay scheduling during a long step, so that the next step includes requests that arrive in the meantime."""
        if len(self.in_flight) != 1 or self._steps_in_flight != 2:
            return
        (step,) = self.in_flight
        begun_s = max(step.launched_s, self.last_settled_s)
        left_s = begun_s + self._scheduler.decide_after_s(step.batch) - self._clock()
        if left_s > 0:
            with contextlib.suppress(Exception):  # device errors are raised again when the step settles
                async with asyncio.timeout(left_s):
                    await step.done.wait()

    # --- launch ---------------------------------------------------------------------------------------------------

    async def _launch_next(self) -> bool:
        """Schedule and launch the next step. Return False if no sequence can advance."""
        batch = self._scheduler.schedule()
        if batch is None:
            return False
        for feature in self._scheduler.features:
            feature.launches(batch, self)
        if batch.masked_rows:
            await self._launch_in_two(batch)
        else:
            step = self.enqueue(lambda: self.runner.launch(batch), batch)
            if step is not None:
                self._observers.launched(batch, step.launched_s)
            elif self._requests:
                await asyncio.sleep(0)  # retry at once, but let other tasks run first
            self._launched(step)
        return True

    async def _launch_in_two(self, batch: ScheduledBatch) -> None:
        output = self.unsampled = self.enqueue(lambda: self.runner.launch_forward(batch), batch)
        if output is None:
            return
        self._observers.launched(batch, output.launched_s)
        settled = True
        while self.in_flight and settled:
            settled = await self._settle_oldest()
        if settled:
            self._launched(await self._masked.sample(output))
        else:  # it depends on a step that failed
            self._scheduler.forget_step([batch])
        self.unsampled = None

    def _launched(self, step: Step | None) -> bool:
        if step is not None:
            self.in_flight.append(step)
        return step is not None

    # --- settle ---------------------------------------------------------------------------------------------------

    async def _settle_oldest(self) -> bool:
        """Wait for the oldest step in flight and deliver its results. If it failed, drop all steps in flight and return False."""
        step = self.in_flight[0]
        try:
            result = await step.result()
            prompt_logprobs = await step.prompt_logprobs()
        except Exception as error:
            log.exception("a step of %d requests failed", len(step.batch.rows))
            await self._fail(error)
            return False
        self.in_flight.popleft()
        self.settle(step, result, prompt_logprobs)
        return True

    def settle(self, step: Step, result: StepResult, prompt_logprobs: list[list[TokenLogprobs] | None]) -> None:
        """Record the results of `step` in the scheduler and deliver them to the streams."""
        batch, before_s, now = step.batch, self.last_settled_s, self._clock()
        self.last_settled_s = now
        self._observers.computed(step, before_s, now)
        self._probes.settled(result)
        for row, entries in zip(batch.prompt_logprobs_rows if prompt_logprobs else (), prompt_logprobs, strict=True):
            self._requests.deliver_prompt_logprobs(row.number, entries)
        all_settled = self._scheduler.settle(batch, result.tokens, result.pooled)
        self._observers.settled(all_settled, now)
        self._requests.deliver(all_settled, result.logprobs)
        self._observers.delivered_step(now)

    async def _fail(self, error: Exception) -> None:
        """End the requests that caused the failure of the oldest step. Other sequences of steps in flight restart."""
        failed, *behind = self.in_flight
        self._faults.blame(error, failed.batch, self.runner)
        for step in behind:
            try:
                await step.result()
            except Exception:
                log.exception("the step launched after the failed one failed too")
        self.in_flight.clear()
        self._scheduler.forget_step([failed.batch, *(step.batch for step in behind)])

    # --- idle and asleep ------------------------------------------------------------------------------------------

    async def _capture_while_idle(self) -> None:
        """Capture graphs one by one until a request arrives. The request waits for at most one capture."""
        while not self._work.is_set() and (captured := self.runner.capture_next(idle=True)) is not None:
            await captured
        if not self._work.is_set():
            self._rested.set()

    async def rested(self) -> None:
        """Wait until the loop has neither work nor graphs to capture, or has ended. Used for measurements."""
        self._rested.clear()
        self.wake()
        await asyncio.wait(
            {self._task, rested := asyncio.ensure_future(self._rested.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        rested.cancel()

    async def _wake_up(self) -> bool:
        """Wake a sleeping engine. Return False if no request needs the engine, or if its runner could not be built."""
        if not self._requests and not self._sleeping.should_wake:
            return False
        try:
            self.runner = await self._sleeping.wake()
        except Exception:
            log.exception("the engine cannot wake; the next request tries again")
            self._requests.end_all(FinishReason.ERROR, "the model could not be loaded again")
            return False
        return True

    def _take_runner(self) -> Runner:
        """Clear the scheduler's device state and return the runner. In its place is now a SleepingRunner, which refuses work."""
        runner, self.runner = self.runner, SleepingRunner()
        self._scheduler.clear()
        return runner

    # --- the door of features and of masked sampling --------------------------------------------------------------

    def wake(self) -> None:
        self._work.set()

    def end(self, number: int, reason: FinishReason, error: str | None = None) -> None:
        self._requests.end(number, reason, error)

    def lose(self, error: BaseException) -> None:
        self._faults.lose(error)
        self.wake()

    def observe(self, observe: Callable[..., Any], *args: Any) -> Any:
        return self._observers.call(observe, *args)

    def enqueue(self, enqueue: Callable[[], T], batch: ScheduledBatch) -> T | None:
        """Call `enqueue`, which launches `batch`, and return its result. If it fails, end or restart the requests; return None."""
        try:
            return enqueue()
        except Exception as error:
            # Steps in flight are not affected.
            log.exception("a step of %d requests could not be launched", len(batch.rows))
            self._faults.blame(error, batch, self.runner)
            self._scheduler.forget_step([batch])
            return None

    def note_deferred(self, sampling: ScheduledBatch) -> None:
        """Record the rows of `sampling`, which are sampled later because their masks were late."""
        self._observers.deferred(sampling, self._clock())
