"""Step: a launched batch, with its launch time, and the event after which its result can be read.

A batch with masked rows takes two launches: its forward pass at once, and the sampling when its masks are ready. The engine's
loop awaits the events; it never blocks the thread on them or polls them."""

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
# Called on the copying thread. Returns uint8 tensors [n, bytes] of host memory, together one row per block in order.
HostPages = Callable[[], Sequence[Any]]


class GpuEvent(Protocol):
    """Awaitable event that marks the end of work on a device."""

    async def wait(self) -> None:
        """Wait until the device has run the work before the event. Raise the exception that the work raised."""
        ...


class SharedEvent(GpuEvent, Protocol):
    """Event that also supports callbacks, so that one task can await several events."""

    def when_passed(self, call: Callable[[BaseException | None], None]) -> None:
        """Call `call` on the event loop when the work before the event has ended, with its exception or None."""
        ...


class WorkerEvent:
    """Event of work on a worker thread. It wraps the future that the thread completes through `call_soon_threadsafe`."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    async def wait(self) -> None:
        # Shielded: a cancelled waiter must not cancel work that the device has started.
        await asyncio.shield(self._future)

    def when_passed(self, call: Callable[[BaseException | None], None]) -> None:
        self._future.add_done_callback(lambda future: call(future.exception()))


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Token masks of a step. `words` [n, ceil(V / 32)] int32: bit masks of the allowed tokens. `rows`: device row of each mask.
    A row with draft tokens has consecutive masks: for its first sampled token, for the token after its first draft token, and
    so on."""

    rows: tuple[int, ...]
    words: MaskWords


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. `tokens`: for each sampling row, in row order, its accepted draft tokens and one sampled token, or
    [NOT_FINITE] if its logits were not finite. `logprobs`: for each sampling row, log-probabilities of its tokens, or None;
    empty if none were requested. `pooled`: for each pooling row, in row order, the pooled values (see `Output.pooled`), or None
    if not finite."""

    tokens: list[list[int]]
    logprobs: Sequence[list[TokenLogprobs] | None] = ()
    pooled: Sequence[memoryview | None] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A launched step. After `done`, `read` returns its result. `read_prompt_logprobs`, which is slow, returns a list for each
    row with a `PromptLogprobsSpan`, or None if its logits are not finite. `idle_before_s` returns how many seconds the device
    was idle before the step. `was_captured` returns True if a graph was replayed."""

    batch: ScheduledBatch
    done: GpuEvent
    read: Callable[[], StepResult]
    read_prompt_logprobs: Callable[[], list[list[TokenLogprobs] | None]] | None = None
    idle_before_s: Callable[[], float | None] = lambda: None
    was_captured: Callable[[], bool] = lambda: False
    launched_s: float = field(default_factory=time.monotonic)

    async def result(self) -> StepResult:
        """Wait for the step to run and return its result. Raises the device's error."""
        await self.done.wait()
        return self.read()

    async def prompt_logprobs(self) -> list[list[TokenLogprobs] | None]:
        """Return the prompt log-probabilities, one entry per row that requested them. Call after `result`."""
        return [] if self.read_prompt_logprobs is None else await asyncio.to_thread(self.read_prompt_logprobs)


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Forward pass of a step whose sampling has not been launched. Launch nothing else until `sample` has been called or the step
    is dropped, because the next step overwrites the logits.

    `sample(batch, masks)` enqueues the sampling of `batch`, or of a batch from `ScheduledBatch.split`, and returns at once.
    `masks` must cover all its masked rows. `snapshot_logits(late)` must be called before `sample`. It copies the logits of the
    rows of `late`, a batch from `split`, without their draft tokens. These rows may be sampled after other launches, while
    their sequences keep the rows. `done` returns an event that marks when the logits are ready. Call it only if needed, since
    it may create an event."""

    batch: ScheduledBatch
    sample: Callable[[ScheduledBatch, RowMasks], Step]
    snapshot_logits: Callable[[ScheduledBatch], ForwardOutput]
    done: Callable[[], GpuEvent]
    launched_s: float = field(default_factory=time.monotonic)


class Runner(Protocol):
    """Interface of a model runner. The tests implement it as FakeRunner."""

    def encode(self, batch: ScheduledBatch) -> Sequence[asyncio.Future[None]]:
        """Drop evicted encoder outputs, then submit the encoder work of `batch`, which runs in parallel with steps. Call this
        before launching the batch.

        Return one future per EncoderWork, in order, done when batches may use its outputs. A future raises RowFailed if the
        item cannot be encoded, or the device's error."""
        ...

    def move_blocks(self, block_ids: Sequence[int], pages: HostPages, *, to_host: bool) -> asyncio.Future[Any]:
        """Copy KV blocks to or from `pages` in host memory, in parallel with steps. Steps in flight must not write blocks that
        are copied to the host, nor use blocks that are overwritten. The future is done when later batches see the copied
        blocks; it raises the device's error."""
        ...

    def launch(self, batch: ScheduledBatch) -> Step:
        """Enqueue `batch`, which has no masked rows, after all earlier launches, and return at once."""
        ...

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        """Enqueue the forward pass of `batch`, which has masked rows. Unmasked rows may be sampled at once, masked rows later."""
        ...

    def capture_next(self, *, idle: bool) -> Awaitable[Any] | None:
        """Start capturing a graph for one frequent kind of step that runs without a graph. Return an awaitable, or None if
        there is nothing to capture. Launch no step until the awaitable is done; steps may be in flight. `idle`: capture rare
        kinds of steps too."""
        ...

    def fault(self, error: BaseException) -> Fault:
        """Return the severity of an error that a launch or a step raised."""
        ...

    async def close(self) -> bool:
        """Stop the runner within a bounded time. Return False if the running computation did not end."""
        ...
