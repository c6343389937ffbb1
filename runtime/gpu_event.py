"""GpuEvent: "the device is done with it", awaitable; the loop never blocks on it and never polls it.

On a CPU the device is one worker thread and its event is `WorkerEvent`: a future that the thread completes through
`call_soon_threadsafe`. `platform/cuda_event.py` fills the same place on CUDA."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class GpuEvent(Protocol):
    async def wait(self) -> None:
        """Return when the work before the event has run; raise what it raised."""
        ...


class SharedEvent(GpuEvent, Protocol):
    """One of several that are awaited together."""

    def when_passed(self, call: Callable[[BaseException | None], None]) -> None:
        """Have the loop call it once the work has run, with what that raised."""
        ...


class WorkerEvent:
    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    async def wait(self) -> None:
        # Shielded: whoever stops waiting must not cancel work that the device has already begun.
        await asyncio.shield(self._future)

    def when_passed(self, call: Callable[[BaseException | None], None]) -> None:
        """See `SharedEvent`."""
        self._future.add_done_callback(lambda future: call(future.exception()))
