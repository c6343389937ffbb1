"""Step: one launch in flight: what was decided, when it was launched, and the event after which its outputs can be read.

A batch with masked rows takes two launches: its forward pass at once, and the draw when its masks are known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from runtime.api import TokenLogprobs
from runtime.batch import ScheduledBatch
from runtime.constrain.masks import RowMasks
from runtime.gpu_event import GpuEvent


@dataclass(frozen=True, slots=True)
class Step:
    batch: ScheduledBatch
    done: GpuEvent
    read_ids: Callable[[], list[int]]  # valid once `done`
    read_logprobs: Callable[[], list[TokenLogprobs | None]] = (
        list  # one per sampling row, or none at all; valid once `done`
    )
    # For each scoring row, in row order, or None where its logits are not finite. Valid once `done`; takes long.
    read_prompt_logprobs: Callable[[], list[list[TokenLogprobs] | None]] | None = None
    idle_before_s: Callable[[], float | None] = lambda: (
        None
    )  # the device's pause since the step before; valid once `done`
    launched_s: float = field(default_factory=time.monotonic)

    async def sampled_ids(self) -> list[int]:
        """One id per sampling row, in row order. Raises what the device raised."""
        await self.done.wait()
        return self.read_ids()

    async def prompt_logprobs(self) -> list[list[TokenLogprobs] | None]:
        """What there is to tell of prompts, one entry per scoring row. Only after `sampled_ids`."""
        return [] if self.read_prompt_logprobs is None else await asyncio.to_thread(self.read_prompt_logprobs)


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The first part of a step, under way. Until `draw` has been called, or the step is given up, nothing else may be launched:
    the logits wait in memory that the next step overwrites.

    `draw` enqueues the rest of `batch`, or what `ScheduledBatch.split` left of it, and returns at once; it takes masks for all
    masked rows that are drawn. `keep`, called before it, copies the logits of the draws that were split off: they may be drawn
    together or in parts, whatever was launched meanwhile, as long as their sequences have their rows. `done`: when the
    logits are there; only asked for where that matters, since it may cost an event."""

    batch: ScheduledBatch
    draw: Callable[[ScheduledBatch, RowMasks], Step]
    keep: Callable[[ScheduledBatch], ForwardPass]
    done: Callable[[], GpuEvent]
    launched_s: float = field(default_factory=time.monotonic)


class Runner(Protocol):
    """What the engine needs of a model runner; FakeRunner in the tests is another one."""

    def launch(self, batch: ScheduledBatch) -> Step:
        """Enqueue `batch`, which has no masked rows, behind what was launched before and return at once."""
        ...

    def launch_forward(self, batch: ScheduledBatch) -> ForwardPass:
        """The same for a batch with masked rows, up to its logits. Whatever other rows sample may be drawn now or later."""
        ...

    async def close(self) -> None: ...
