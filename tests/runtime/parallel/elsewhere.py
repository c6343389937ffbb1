"""ThreadLauncher: the processes of other stages as threads of this one, each with a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from runtime.parallel.messages import Join, ModelName
from runtime.parallel.processes import StageProcesses
from runtime.stage_process import compute_stage


class ThreadLauncher:
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.joins: list[Join] = []

    def begin(self, joins: Sequence[Join], ended: Callable[[int, str], None]) -> None:
        self.joins += joins
        for join in joins:
            self.threads.append(threading.Thread(target=lambda join=join: asyncio.run(compute_stage(join))))
            self.threads[-1].start()

    async def close(self) -> None:
        for thread in self.threads:
            await asyncio.to_thread(thread.join)


def elsewhere(files) -> StageProcesses:
    """Those of a model whose files stand in a folder."""
    return StageProcesses(ThreadLauncher(), ModelName(str(files.path), None))
