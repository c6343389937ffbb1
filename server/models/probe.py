"""TokenProbe: one token for all who ask whether the engine still makes some, however many and however often they ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from runtime.api import EngineClient, EngineError

LIMIT_S = 20.0  # for a token
REUSE_S = 1.0  # an answer is good for so long


class TokenProbe:
    """`clock` gives seconds. One probe is under way at a time, and who asks meanwhile waits for that one."""

    def __init__(
        self, limit_s: float = LIMIT_S, reuse_s: float = REUSE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._reuse_s = reuse_s
        self._clock = clock
        self._task: asyncio.Task[str | None] | None = None
        self._ended_s = 0.0

    async def failure(self, engine: EngineClient) -> str | None:
        """Why there was no token within the limit; None where there was one."""
        # Shielded: others wait for it as well.
        return await asyncio.shield(self.begin(engine))

    def begin(self, engine: EngineClient) -> asyncio.Task[str | None]:
        """The probe under way, or the last one while it is fresh, or a new one."""
        task = self._task
        if task is None or (task.done() and self._clock() - self._ended_s >= self._reuse_s):
            task = self._task = asyncio.create_task(self._probe(engine), name="probe")
        return task

    async def _probe(self, engine: EngineClient) -> str | None:
        try:
            async with asyncio.timeout(self._limit_s):
                await engine.probe()
        except TimeoutError:
            return f"no token within {self._limit_s:g} s"
        except EngineError as error:
            return str(error)
        finally:
            self._ended_s = self._clock()
        return None
