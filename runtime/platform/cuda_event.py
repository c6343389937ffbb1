"""GpuEvent for CUDA: the loop sleeps until the device is done, and neither polls nor spins.

One thread waits for the events in their order, in the driver, and completes a future of the loop for each. There it sleeps, too, or
for a short step that came to an idle device watches all the time: it knows of its end sooner. A callback of the
driver's own that writes to an eventfd, which the loop watches, was measured beside it: on an H200, with clocks up, the loop went
on 338 us after the device's end, with the thread 76 us (tests/benches/cuda_event.py, medians). Nor is a callback
told when the device fails: a waiting loop would never know."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import torch


class CudaEvent:
    """Awaits `future`, which the waiter completes."""

    def __init__(self, future: asyncio.Future[None]) -> None:
        self._future = future

    async def wait(self) -> None:
        # Shielded: whoever stops waiting must not keep the next one from waiting.
        await asyncio.shield(self._future)

    def when_passed(self, call: Callable[[BaseException | None], None]) -> None:
        """See `SharedEvent`."""
        self._future.add_done_callback(lambda future: call(future.exception()))


class EventWaiter:
    """The thread. Create it on any thread; `after` belongs to the loop's."""

    def __init__(self) -> None:
        self._recorded: SimpleQueue[tuple[torch.cuda.Event, asyncio.Future[None]] | None] = SimpleQueue()
        self._thread = Thread(target=self._wait_in_order, name="oneloop-cuda-events", daemon=True)
        self._thread.start()

    def after(self, event: torch.cuda.Event) -> CudaEvent:
        """`event` is recorded; made with `blocking`, it is slept for. Its wait raises what the device raised."""
        future = asyncio.get_running_loop().create_future()
        self.watch(event, future)
        return CudaEvent(future)

    def watch(self, event: torch.cuda.Event, future: asyncio.Future[None]) -> None:
        """Complete a loop's future after `event`; on any thread."""
        self._recorded.put((event, future))

    def give_up(self, future: asyncio.Future[None], error: BaseException) -> None:
        """There will be no event; on any thread."""
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")  # the loop would end with it
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            future.get_loop().call_soon_threadsafe(_complete, future, error)

    def close(self) -> None:
        """Does not wait for a device that hangs."""
        self._recorded.put(None)
        self._thread.join(timeout=1.0)

    @property
    def has_ended(self) -> bool:
        """Whether, once it is closed, it waits for nothing any more."""
        return not self._thread.is_alive()

    def _wait_in_order(self) -> None:
        while (entry := self._recorded.get()) is not None:
            event, future = entry
            error: Exception | None = None
            try:
                event.synchronize()
            except RuntimeError as failure:
                error = failure
            try:
                future.get_loop().call_soon_threadsafe(_complete, future, error)
            except RuntimeError:  # the loop has been closed
                return


def _complete(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # seen: an engine that has died does not wait for it
