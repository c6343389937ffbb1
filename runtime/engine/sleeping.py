"""Sleeping: an idle engine frees its memory (weights and KV cache) and allocates it again for the next request.

Falling asleep closes and drops the runner. Waking builds a new runner, because captured graphs contain old addresses. The
scheduler, queue, statistics and waiting requests are kept, so requests during sleep are handled as usual. Uses no tensors; the
engine's loop calls it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from runtime.api import Metric, SleepError, SleepLevel
from runtime.batch import ScheduledBatch
from runtime.fault import Fault, host_fault
from runtime.step import ForwardOutput, HostPages, Runner, Step

log = logging.getLogger("oneloop.sleep")

CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]
STATES = {
    SleepLevel.AWAKE: "awake",
    SleepLevel.HOST: "weights_offloaded",
    SleepLevel.DROPPED: "discard_all",
}  # as in vLLM


class RunnerFactory(Protocol):
    """Factory that builds a new runner when the engine wakes."""

    async def build(self) -> Runner:
        """Build a runner with the same model, rows and blocks as the first runner. Raises the errors of engine start-up."""
        ...

    async def release(self, level: SleepLevel) -> None:
        """Free the memory of a runner that has been closed and dropped. `level`: also drop the page cache if DROPPED."""
        ...


class SleepingRunner:
    """Runner of a sleeping engine. It refuses all work."""

    def encode(self, batch: ScheduledBatch) -> NoReturn:
        self._refuse()

    def move_blocks(self, block_ids: Sequence[int], pages: HostPages, *, to_host: bool) -> NoReturn:
        self._refuse()

    def launch(self, batch: ScheduledBatch) -> Step:
        self._refuse()

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("the engine sleeps")

    def capture_next(self, *, idle: bool) -> None:
        return None

    def fault(self, error: BaseException) -> Fault:
        return host_fault(error)

    async def close(self) -> bool:
        return True


class Sleeping:
    """Sleep state of an engine. `after_s`: idle seconds after which it falls asleep, or None. `wake`: function that makes the
    engine's loop check for work."""

    def __init__(
        self, runner_factory: RunnerFactory | None, after_s: float | None, wake: Callable[[], None], clock: Callable[[], float],
        call_later: CallLater | None = None,
    ) -> None:  # fmt: skip
        self.level = SleepLevel.AWAKE
        self._runner_factory = runner_factory
        self._after_s = after_s if runner_factory is not None else None
        self._wake = wake
        self._clock = clock
        self._call_later = call_later or asyncio.get_running_loop().call_later
        self._alarm: asyncio.TimerHandle | None = None
        self._last_used_s = clock()
        self._wanted: SleepLevel | None = None  # the requested level, until it is reached
        self._changed: asyncio.Future[None] | None = None  # completes when the requested level is reached or fails

    # --- for callers ----------------------------------------------------------------------------------------------

    async def become(self, level: SleepLevel) -> None:
        """Wait until the engine has reached `level`. It changes its level when it is idle. A later call replaces an earlier one.

        Raises SleepError."""
        if self._runner_factory is None:
            raise SleepError(
                "this engine cannot sleep: it was built without model files, so it could not reload the model"
            )
        if level is self.level is SleepLevel.AWAKE:
            self._tell()  # a pending request to sleep is cancelled
            return
        self._wanted = level
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        changed = self._changed
        self._wake()
        await asyncio.shield(changed)

    def used(self) -> None:
        """Restart the idle timer, because a request arrived or ended."""
        self._last_used_s = self._clock()

    # --- the engine's loop ----------------------------------------------------------------------------------------

    @property
    def should_wake(self) -> bool:
        """True if a sleeping engine should wake because `become` requested it."""
        return self.level is not SleepLevel.AWAKE and self._wanted is SleepLevel.AWAKE

    async def rest(self, take_runner: Callable[[], Runner]) -> None:
        """Fall asleep if this was requested or the idle time is over; otherwise set a timer. Call it when the engine is idle.
        `take_runner` returns the runner, which is then closed."""
        wanted = self._wanted
        if wanted is None and self._is_late():
            wanted = SleepLevel.HOST
        if wanted is not None and wanted > self.level:
            await self._fall_asleep(wanted, take_runner)
        if self._wanted is not None and (self._wanted > SleepLevel.AWAKE or self.level is SleepLevel.AWAKE):
            self._tell()
        self._set_alarm()

    async def wake(self) -> Runner:
        """Build and return a new runner. If that fails, the engine stays asleep and the error is raised."""
        assert self._runner_factory is not None, "it fell asleep"
        began_s = time.monotonic()
        try:
            runner = await self._runner_factory.build()
        except Exception as error:
            self._tell(SleepError(f"the engine cannot wake: {error}"))
            raise
        self.level = SleepLevel.AWAKE
        self.used()
        self._tell()
        log.info("awake again after %.1f s", time.monotonic() - began_s)
        return runner

    def stop_waiting(self) -> None:
        """Cancel the sleep timer, because there is work or the engine closes."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def close(self) -> None:
        self.stop_waiting()
        self._tell(SleepError("the server is shutting down"))

    def metric(self) -> Metric:
        samples: dict[tuple[tuple[str, str], ...], float] = {
            (("sleep_state", state),): float(level is self.level) for level, state in STATES.items()
        }
        return Metric("engine_sleep_state", "1 for the state that the engine is in.", "gauge", samples)

    async def _fall_asleep(self, level: SleepLevel, take_runner: Callable[[], Runner]) -> None:
        assert self._runner_factory is not None, "it may sleep"
        was_awake, self.level = self.level is SleepLevel.AWAKE, level
        if was_awake and not await take_runner().close():
            raise RuntimeError("the last step did not end")
        await self._runner_factory.release(level)
        log.info("asleep (level %d): weights and KV cache are freed", level)

    def _is_late(self) -> bool:
        due = self.level is SleepLevel.AWAKE and self._after_s is not None
        return due and self._clock() - self._last_used_s >= (self._after_s or 0.0)

    def _set_alarm(self) -> None:
        self.stop_waiting()
        if self._after_s is not None and self.level is SleepLevel.AWAKE:
            left_s = self._after_s - (self._clock() - self._last_used_s)
            self._alarm = self._call_later(max(0.0, left_s), self._wake)

    def _tell(self, error: SleepError | None = None) -> None:
        changed, self._changed, self._wanted = self._changed, None, None
        if changed is None or changed.done():
            return
        if error is None:
            changed.set_result(None)
        else:
            changed.set_exception(error)
            changed.exception()  # marks the exception as retrieved, in case no caller waits for it
