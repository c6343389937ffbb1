"""The one way off the event loop for text: tokenising and rendering what is long.

Short work is done where it stands, since a thread's round trip costs more than it; long work, which would freeze every open
stream for its duration, goes to a small pool (tokenizers release the GIL)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SHORT_CHARS = 2_000  # about half a millisecond of tokenising


class Offload:
    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="oneloop-text")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """The result of `work`, whose cost grows with `num_chars`."""
        if num_chars <= SHORT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Work that has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
