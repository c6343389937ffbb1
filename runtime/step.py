"""Step: one launch in flight, with what was decided, when it was launched, and the event after which its result can be read.

A batch with masked rows takes two launches: its forward pass at once, and the sampling when its masks are known. The loop awaits
events; it never blocks on them and never polls them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.api import TokenLogprobs
from runtime.batch import ScheduledBatch
from runtime.fault import Fault

MaskWords = NDArray[np.int32]
# Called on the thread that copies: rows of host memory, one for each block in order, as tensors [n, bytes] uint8 of several rows.
HostPages = Callable[[], Sequence[Any]]


class GpuEvent(Protocol):
    """The end of work on a device, awaitable."""

    async def wait(self) -> None:
        """Return when the work before the event has run; raise what it raised."""
        ...


class SharedEvent(GpuEvent, Protocol):
    """An event that is awaited together with others."""

    def when_passed(self, call: Callable[[BaseException | None], None]) -> None:
        """Have the loop call it once the work has run, with what that raised."""
        ...


class WorkerEvent:
    """The event of a device that is a worker thread: a future that the thread completes through `call_soon_threadsafe`."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    async def wait(self) -> None:
        # Shielded: whoever stops waiting must not cancel work that the device has already begun.
        await asyncio.shield(self._future)

    def when_passed(self, call: Callable[[BaseException | None], None]) -> None:
        """See `SharedEvent`."""
        self._future.add_done_callback(lambda future: call(future.exception()))


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of a step. `words` [n, V / 32 up] int32: the tokens that each of the device rows `rows` may draw. A row with drafts has
    several neighbouring entries: for its first draw, behind its first draft, and so on, as far as drafts may be drawn."""

    rows: tuple[int, ...]
    words: MaskWords


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. `tokens`: for each sampling row, in row order, the ids that it gained: accepted drafts and one more,
    [NOT_FINITE] if its logits were unusable. `logprobs`: for each sampling row those of its tokens or None; empty if none
    were requested. `pooled`: for each pooling row, in row order, the future `Output.pooled`, None if it was not finite."""

    tokens: list[list[int]]
    logprobs: Sequence[list[TokenLogprobs] | None] = ()
    pooled: Sequence[memoryview | None] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Launched step. `read` is valid after `done`, as is `read_prompt_logprobs`, which is slow: for each row with a
    `PromptLogprobsSpan`, in row order, its entries, None if its logits are not finite. `idle_before_s`: the device's pause
    before the step. `was_captured`: a graph was replayed."""

    batch: ScheduledBatch
    done: GpuEvent
    read: Callable[[], StepResult]
    read_prompt_logprobs: Callable[[], list[list[TokenLogprobs] | None]] | None = None
    idle_before_s: Callable[[], float | None] = lambda: None
    was_captured: Callable[[], bool] = lambda: False
    launched_s: float = field(default_factory=time.monotonic)

    async def result(self) -> StepResult:
        """Raises what the device raised."""
        await self.done.wait()
        return self.read()

    async def prompt_logprobs(self) -> list[list[TokenLogprobs] | None]:
        """Return the prompt log-probabilities, one entry per row that requested them. Call after `result`."""
        return [] if self.read_prompt_logprobs is None else await asyncio.to_thread(self.read_prompt_logprobs)


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The first part of a step, under way. Until `sample` has been called, or the step is given up, nothing else may be launched:
    the logits wait in memory that the next step overwrites.

    `sample` enqueues the rest of `batch`, or what `ScheduledBatch.split` left of it, and returns at once; it takes masks for all
    masked rows that are sampled. `snapshot_logits`, called before it, copies the logits of the rows that were split off, and gives
    up their drafts: they may be sampled together or in parts, whatever was launched meanwhile, as long as their sequences have
    their rows. `done`: when
    the logits are there; only asked for where that matters, since it may cost an event."""

    batch: ScheduledBatch
    sample: Callable[[ScheduledBatch, RowMasks], Step]
    snapshot_logits: Callable[[ScheduledBatch], ForwardOutput]
    done: Callable[[], GpuEvent]
    launched_s: float = field(default_factory=time.monotonic)


class Runner(Protocol):
    """Protocol of a model runner. FakeRunner in the tests is another one."""

    def encode(self, batch: ScheduledBatch) -> Sequence[asyncio.Future[None]]:
        """Drop evicted encoder outputs and submit the encoder work of `batch`, beside steps. Call it before launching the
        batch.

        Return a future per piece of work, in order, done when batches may use its outputs. It raises RowFailed if the item
        cannot be encoded, or the device's error."""
        ...

    def move_blocks(self, block_ids: Sequence[int], pages: HostPages, *, to_host: bool) -> asyncio.Future[Any]:
        """Copy KV blocks to or from host memory, beside steps. No step in flight may write the blocks that are read, or use
        those that are written. Batches launched once the future is done find what was copied; it raises what the device
        raised."""
        ...

    def launch(self, batch: ScheduledBatch) -> Step:
        """Enqueue `batch`, which has no masked rows, behind what was launched before and return at once."""
        ...

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        """The same for a batch with masked rows, up to its logits. Whatever other rows sample may be sampled now or later."""
        ...

    def capture_next(self, *, idle: bool) -> Awaitable[Any] | None:
        """Begin to prepare one kind of step that has been slower than it could be; nothing may be launched until that is done, but
        steps may be in flight. Unless it is `idle`, only what many steps went without. None where there is nothing to do, now."""
        ...

    def fault(self, error: BaseException) -> Fault:
        """Classify an error of a launch or of a step's end."""
        ...

    async def close(self) -> bool:
        """Bounded in time. False where what is being computed did not end."""
        ...
