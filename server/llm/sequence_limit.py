"""SequenceLimit: limits the number of sequences that all calls of a program have in the engine together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class SequenceLimit:
    """Limit of sequences in the engine. Requests enter in order of arrival. A request for more than `limit` runs alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = asyncio.Semaphore(limit)
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def room_for(self, num_sequences: int) -> AsyncIterator[None]:
        taken = 0
        try:
            async with self._turn:
                while taken < min(num_sequences, self.limit):
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()
