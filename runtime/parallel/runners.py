"""RankRunners: the runners of all ranks as one. A step is launched on each, its result is the first's: all draw the same ids of
the same logits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from runtime.batch import ScheduledBatch
from runtime.constrain.masks import RowMasks
from runtime.fault import Fault
from runtime.gpu_event import GpuEvent
from runtime.parallel.group import Apart
from runtime.step import ForwardOutput, Runner, Step

S = TypeVar("S")
L = TypeVar("L")


class RankRunners:
    def __init__(self, runners: Sequence[Runner], end: Callable[[], None]) -> None:
        """`end`: has ranks fail that wait for one which will compute nothing any more."""
        self._runners = runners
        self._end = end

    def encode(self, batch: ScheduledBatch) -> list[asyncio.Future[None]]:
        of_ranks = zip(*(runner.encode(batch) for runner in self._runners), strict=True)
        return [asyncio.ensure_future(_all(each)) for each in of_ranks]

    def launch(self, batch: ScheduledBatch) -> Step:
        return _step(batch, self._each(self._runners, lambda runner: runner.launch(batch)))

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        return self._output(batch, self._each(self._runners, lambda runner: runner.launch_forward(batch)))

    def fault(self, error: BaseException) -> Fault:
        return self._runners[0].fault(error)

    async def close(self) -> bool:
        self._end()
        return all(await asyncio.gather(*(runner.close() for runner in self._runners)))

    def _output(self, batch: ScheduledBatch, outputs: Sequence[ForwardOutput]) -> ForwardOutput:
        def sample(some: ScheduledBatch, masks: RowMasks) -> Step:
            return _step(some, self._each(outputs, lambda output: output.sample(some, masks)))

        def snapshot_logits(some: ScheduledBatch) -> ForwardOutput:
            return self._output(some, self._each(outputs, lambda output: output.snapshot_logits(some)))

        return ForwardOutput(batch, sample, snapshot_logits, lambda: EveryEvent([output.done() for output in outputs]))

    def _each(self, of: Sequence[S], launch: Callable[[S], L]) -> list[L]:
        try:
            return [launch(each) for each in of]
        except BaseException:
            self._end()  # those before it would wait for it
            raise


async def _all(ends: Sequence[asyncio.Future[None]]) -> None:
    """Raises what one of them raised, once all have ended."""
    for error in await asyncio.gather(*ends, return_exceptions=True):
        if error is not None:
            raise error


def _step(batch: ScheduledBatch, steps: Sequence[Step]) -> Step:
    first = steps[0]
    done = EveryEvent([step.done for step in steps])
    return Step(batch, done, first.read, first.read_prompt_logprobs, first.idle_before_s, first.was_captured)


class EveryEvent:
    """When all have happened."""

    def __init__(self, events: Sequence[GpuEvent]) -> None:
        self._events = events

    async def wait(self) -> None:
        """Raises what one raised that was not merely left alone by another."""
        ends = await asyncio.gather(*(event.wait() for event in self._events), return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Apart))
