"""FarRunner: local proxy of the runner of a pipeline stage in another process.

Steps are sent when they are launched, and complete when the other process reports their end. If that process or its host fails,
waiting calls and later launches raise `ProcessGone`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from runtime.api import TokenLogprobs
from runtime.batch import ScheduledBatch
from runtime.fault import Fault, RowFailed, WorkerGone
from runtime.parallel.connection import PeerConnection
from runtime.parallel.group import Apart
from runtime.parallel.messages import (
    Await,
    Close,
    Failed,
    Forget,
    PromptLogprobsDone,
    StepDone,
    Work,
    with_views,
)
from runtime.parallel.stages import Turn
from runtime.step import ForwardOutput, GpuEvent, RowMasks, Runner, Step, StepResult, WorkerEvent

CLOSE_LIMIT_S = 5.0  # time for running work there to end


class ProcessGone(WorkerGone):
    """Error: the process of a pipeline stage has ended or is unreachable."""


class FarFailure(RuntimeError):
    """Error of a step in another process. `text`: the error's message. `fault`: severity of the error, as reported there."""

    def __init__(self, text: str, fault: Fault) -> None:
        super().__init__(text)
        self.fault = fault


@dataclass(slots=True)
class _Pending:
    """A step in flight. `prompt_logprobs`: set after `ended`, but only if `has_prompt_logprobs`."""

    has_prompt_logprobs: bool
    ended: asyncio.Future[StepDone]
    prompt_logprobs: Future[list[list[TokenLogprobs] | None]] = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # marks the exception as retrieved: a dead engine does not await it
        if not self.prompt_logprobs.done():
            self.prompt_logprobs.set_exception(error)

    def result(self) -> StepResult:
        result = self.ended.result().result
        return StepResult([]) if result is None else with_views(result)


class _Kept:
    """Handle of the logits of a step in the other process. The logits are freed there when this object is freed."""


class FarRunner:
    def __init__(self, connection: PeerConnection, place: str, beside: Runner) -> None:
        """Create the proxy. `place`: name of the process in error messages. `beside`: runner of this process, which determines
        the severity of errors."""
        self.next = Turn()
        self._connection, self._beside = connection, beside
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._num_sent = 0
        self._pending: dict[int, _Pending] = {}
        self._gone: ProcessGone | None = None
        self._closing: asyncio.Future[bool] | None = None

    # --- Runner ---------------------------------------------------------------------------------------------------

    def encode(self, batch: ScheduledBatch) -> Sequence[asyncio.Future[None]]:
        assert not batch.encoder_work, "a model of several stages has no encoder"
        return ()

    def launch(self, batch: ScheduledBatch) -> Step:
        return self._step(batch, self._work(batch)[1])

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        return self._output(batch, self._work(batch, to_sample=True)[0])

    def capture_next(self, *, idle: bool) -> None:
        return None

    def fault(self, error: BaseException) -> Fault:
        if isinstance(error, FarFailure):
            return error.fault
        return Fault.LOST if isinstance(error, ProcessGone) else self._beside.fault(error)

    async def close(self) -> bool:
        """Stop the other process's runner, see `Runner.close`. Return False if it did not confirm in time."""
        if self._gone is not None:
            return True
        self._closing = self._loop.create_future()
        self._connection.send(Close())
        await asyncio.wait({self._closing}, timeout=CLOSE_LIMIT_S)
        return self._closing.done()

    # --- receiving ------------------------------------------------------------------------------------------------

    def on_message(self, message: object) -> None:
        match message:
            case StepDone(number):
                pending = self._pending[number]
                pending.ended.set_result(message)
                if not pending.has_prompt_logprobs:
                    del self._pending[number]
            case PromptLogprobsDone(number, entries):
                self._pending.pop(number).prompt_logprobs.set_result(entries)
            case Failed(number):
                self._pending.pop(number).fail(_as_raised(message))

    def lost(self, why: str) -> ProcessGone:
        """Fail all steps in flight, because the connection was lost. Return the error that they raise."""
        if self._gone is None:
            self._gone = ProcessGone(why)
            self._gone.add_note(f"{self._place}: {why}")
            for pending in self._pending.values():
                pending.fail(self._gone)
            self._pending.clear()
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(True)
        return self._gone

    # --- sending --------------------------------------------------------------------------------------------------

    def _work(
        self, batch: ScheduledBatch, of: int | None = None, masks: RowMasks | None = None, *, to_sample: bool = False
    ) -> tuple[int, _Pending]:
        """Send work. Return its number and pending result. `to_sample`: a later message samples the step. Raises ProcessGone."""
        turn, self.next = self.next, Turn()
        number, pending = self._awaited(has_prompt_logprobs=bool(batch.prompt_logprobs_rows))
        if to_sample:
            del self._pending[number]
        self._connection.send(Work(number, batch, turn, to_sample, of, masks))
        return number, pending

    def _awaited(self, *, has_prompt_logprobs: bool = False) -> tuple[int, _Pending]:
        """Register a new pending step. Return its number and the step. Raises ProcessGone."""
        if self._gone is not None:
            raise self._gone
        self._num_sent += 1
        pending = self._pending[self._num_sent] = _Pending(has_prompt_logprobs, self._loop.create_future())
        return self._num_sent, pending

    def _step(self, batch: ScheduledBatch, pending: _Pending) -> Step:
        return Step(
            batch,
            WorkerEvent(pending.ended),
            pending.result,
            pending.prompt_logprobs.result if pending.has_prompt_logprobs else None,
            lambda: pending.ended.result().idle_before_s,
            lambda: pending.ended.result().was_captured,
        )

    def _output(self, batch: ScheduledBatch, number: int) -> ForwardOutput:
        kept = _Kept()
        weakref.finalize(kept, self._forget, number)

        def sample(some: ScheduledBatch, masks: RowMasks, kept: _Kept = kept) -> Step:
            return self._step(some, self._work(some, number, masks)[1])

        def snapshot_logits(some: ScheduledBatch, kept: _Kept = kept) -> ForwardOutput:
            return self._output(some, self._work(some, number, to_sample=True)[0])

        def done() -> GpuEvent:
            awaiting, pending = self._awaited()
            self._connection.send(Await(awaiting, number))
            return WorkerEvent(pending.ended)

        return ForwardOutput(batch, sample, snapshot_logits, done)

    def _forget(self, number: int) -> None:
        """Free forward pass `number` in the other process. Called on the thread that drops the last reference."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send_forget, number)

    def _send_forget(self, number: int) -> None:
        if self._gone is None and self._closing is None:
            self._connection.send(Forget(number))


def _as_raised(failed: Failed) -> BaseException:
    error: BaseException = FarFailure(failed.text, failed.fault)
    if failed.row is not None:
        error = RowFailed(failed.row)
    elif failed.is_apart:
        error = Apart(failed.text)
    for note in failed.notes:
        error.add_note(note)
    return error
