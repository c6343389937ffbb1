"""Cancellation of tasks when their client disconnects, or when one of several tasks fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from server.http.errors import ClientLeft

if TYPE_CHECKING:
    from starlette.types import Receive

T = TypeVar("T")


class ClientWatch:
    """Context whose block is cancelled when the client disconnects: `async with ClientWatch(receive) as watch: ...`.

    The block is cancelled at its current `await`. The context suppresses the CancelledError and sets `watch.gone` to True.
    `ping` is awaited after every `interval_s` seconds in which `quiet` was not set to False."""

    def __init__(
        self, receive: Receive, ping: Callable[[], Awaitable[None]] | None = None, interval_s: float = 0
    ) -> None:
        self.gone = False
        self._receive = receive
        self._ping = ping
        self._interval_s = interval_s if ping is not None and interval_s > 0 else None
        self.quiet = True  # whoever sends something writes False: the next ping can wait

    async def __aenter__(self) -> Self:
        owner = asyncio.current_task()
        assert owner is not None, "a coroutine runs in a task"
        self._owner = owner
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Not awaited: it holds nothing, and ends in the loop's next round.
        self._watcher.cancel()
        del self._watcher  # its error has this object in its traceback: they would keep each other
        # Somebody else's cancellation on top of ours has to go on.
        return self.gone and self._owner.uncancel() == 0 and kind is asyncio.CancelledError

    async def _watch(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    message = await self._receive()
            except TimeoutError:
                await self._ping_if_quiet()
                continue
            if message["type"] == "http.disconnect":
                self.gone = True
                self._owner.cancel()
                return

    async def _ping_if_quiet(self) -> None:
        if self.quiet and self._ping is not None:
            await self._ping()
        self.quiet = True


async def while_waited_for(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel `work` if the client disconnects. Raises ClientLeft."""
    async with ClientWatch(receive):
        return await work
    raise ClientLeft


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of the coroutines in order. If one fails, the others are cancelled, and its error is raised afterwards.

    Unlike a TaskGroup's error, the error is in no reference cycle. A cycle would keep the traceback's objects alive."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: list[asyncio.Task[T]]) -> None:
    """Cancel `tasks`, wait for their end and empty the list."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
