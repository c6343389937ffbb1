"""The processes of other stages without a cluster: as threads of this one, each with a loop of its own, or as processes of this
machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from runtime.parallel.connection import packed
from runtime.parallel.messages import Join, ModelName
from runtime.parallel.processes import StageProcesses
from runtime.start.stage_process import compute_stage


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


_STAGE = """
import asyncio, sys
from runtime.parallel.connection import unpacked
from runtime.start.stage_process import compute_stage

asyncio.run(compute_stage(unpacked(sys.stdin.buffer.read())))
"""


class ProcessLauncher:
    """`environ`: of each stage's process, by stage, beside this one's."""

    host = "127.0.0.1"

    def __init__(self, environ: Callable[[int], Mapping[str, str]] = lambda stage: {}) -> None:
        self._environ = environ
        self._processes: list[subprocess.Popen[bytes]] = []

    def begin(self, joins: Sequence[Join], ended: Callable[[int, str], None]) -> None:
        for join in joins:
            process = subprocess.Popen(
                [sys.executable, "-c", _STAGE], stdin=subprocess.PIPE, env={**os.environ, **self._environ(join.stage)}
            )
            assert process.stdin is not None
            process.stdin.write(packed(join))
            process.stdin.close()
            self._processes.append(process)

    async def close(self) -> None:
        for process in self._processes:
            process.kill()
            await asyncio.to_thread(process.wait)


def elsewhere(files) -> StageProcesses:
    """Those of a model whose files stand in a folder."""
    return StageProcesses(ThreadLauncher(), ModelName(str(files.path), None))
