"""Coroutines that run at the same time and fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first error is raised once the other coroutines are cancelled and have ended.

    Unlike a TaskGroup's, the error is in no reference cycle, which would keep everything that its traceback holds."""
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
