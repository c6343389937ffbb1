"""RankRunners: combines the runners of all ranks in one runner. A step is launched on each rank. The first rank's result is
returned, since all ranks sample the same ids from the same logits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from runtime.batch import ScheduledBatch
from runtime.fault import Fault
from runtime.parallel.group import Apart
from runtime.step import ForwardOutput, GpuEvent, HostPages, RowMasks, Runner, SharedEvent, Step

S = TypeVar("S")
L = TypeVar("L")


class RankRunners:
    def __init__(self, runners: Sequence[Runner], end: Callable[[], None]) -> None:
        """Create the runner. `end`: function that fails all waits of ranks for each other."""
        self._runners = runners
        self._end = end

    def encode(self, batch: ScheduledBatch) -> list[asyncio.Future[None]]:
        of_ranks = zip(*(runner.encode(batch) for runner in self._runners), strict=True)
        return [asyncio.ensure_future(_all(each)) for each in of_ranks]

    def move_blocks(self, block_ids: Sequence[int], pages: HostPages, *, to_host: bool) -> asyncio.Future[None]:
        """Copy KV blocks, see `Runner.move_blocks`. Each rank copies an equal part of every row of `pages`."""
        num = len(self._runners)

        def part(number: int) -> HostPages:
            return lambda: [rows.chunk(num, dim=1)[number] for rows in pages()]

        moved = [runner.move_blocks(block_ids, part(n), to_host=to_host) for n, runner in enumerate(self._runners)]
        return asyncio.ensure_future(_all(moved))

    def launch(self, batch: ScheduledBatch) -> Step:
        return self._step(batch, self._each(self._runners, lambda runner: runner.launch(batch)))

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        return self._output(batch, self._each(self._runners, lambda runner: runner.launch_forward(batch)))

    def capture_next(self, *, idle: bool) -> None:
        return None

    def fault(self, error: BaseException) -> Fault:
        return self._runners[0].fault(error)

    async def close(self) -> bool:
        self._end()
        return all(await asyncio.gather(*(runner.close() for runner in self._runners)))

    def _output(self, batch: ScheduledBatch, outputs: Sequence[ForwardOutput]) -> ForwardOutput:
        def sample(some: ScheduledBatch, masks: RowMasks) -> Step:
            return self._step(some, self._each(outputs, lambda output: output.sample(some, masks)))

        def snapshot_logits(some: ScheduledBatch) -> ForwardOutput:
            return self._output(some, self._each(outputs, lambda output: output.snapshot_logits(some)))

        return ForwardOutput(
            batch, sample, snapshot_logits, lambda: self._all_of([output.done() for output in outputs])
        )

    def _step(self, batch: ScheduledBatch, steps: Sequence[Step]) -> Step:
        first = steps[0]
        done = self._all_of([step.done for step in steps])
        return Step(batch, done, first.read, first.read_prompt_logprobs, first.idle_before_s, first.was_captured)

    def _all_of(self, events: Sequence[GpuEvent]) -> GpuEvent:
        return EveryEvent(events, "rank")

    def _each(self, of: Sequence[S], launch: Callable[[S], L]) -> list[L]:
        launched: list[L] = []
        try:
            for each in of:
                launched += [launch(each)]
        except BaseException as error:
            self._end()  # other ranks would wait for it
            blame(error, "rank", len(launched), len(of))
            raise
        return launched


async def _all(ends: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for all futures in `ends`, then raise the first error, if any."""
    for ended in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended


def blame(error: BaseException, kind: str, number: int, size: int) -> None:
    """Add the note "`kind` `number` of `size`" to an error, unless another rank or stage caused it."""
    note = f"{kind} {number} of {size}"
    if not isinstance(error, Apart) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


class EveryEvent:
    """Event that combines the events of all ranks or stages. It passes when all of them have passed, or when one has failed,
    because the remaining ones may then never pass."""

    def __init__(self, events: Sequence[GpuEvent], kind: str) -> None:
        """Combine `events`, all of which are SharedEvents. `kind`: "rank" or "stage", for error messages."""
        self._events, self._kind = cast("Sequence[SharedEvent]", events), kind

    async def wait(self) -> None:
        """Wait for all events without creating tasks. Raises the original error, with a note that names its rank or stage."""
        passed: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.when_passed(lambda error: None if passed.done() else passed.set_result(error))
        if (error := await passed) is not None:
            raise error

    def when_passed(self, call: Callable[[BaseException | None], None]) -> None:
        """Call `call` when this event has passed, see `SharedEvent.when_passed`."""
        left, alone, has_passed = len(self._events), list[BaseException](), False

        def one(number: int, error: BaseException | None) -> None:
            nonlocal left, has_passed
            left -= 1
            if error is not None:
                blame(error, self._kind, number, len(self._events))
                alone.append(error)
            if not has_passed and (not left or not isinstance(error, Apart | None)):
                has_passed = True
                call(alone[-1] if alone else None)

        for number, event in enumerate(self._events):
            event.when_passed(partial(one, number))
