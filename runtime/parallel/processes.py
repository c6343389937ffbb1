"""StageProcesses: the processes of all stages of a model except the first, each on its own host.

A `Launcher` starts the processes (`server/ray/stages.py` uses Ray). They connect to this process, receive their configuration,
and then receive steps through `FarRunner`. If one of them ends, the engine fails, since no other process has its layers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from runtime.config import EngineConfig
from runtime.parallel.connection import PeerConnection
from runtime.parallel.far_runner import FarRunner, ProcessGone
from runtime.parallel.links import SECRET_BYTES
from runtime.parallel.messages import Build, Built, Join, Joined, ModelName, NotBuilt
from runtime.parallel.stage_runners import StageRunners
from runtime.step import Runner

log = logging.getLogger("oneloop.start")


class Launcher(Protocol):
    """Interface for starting processes on other hosts."""

    @property
    def host(self) -> str:
        """Return an address of this machine that the other hosts can reach."""
        ...

    def begin(self, joins: Sequence[Join], ended: Callable[[int, str], None]) -> None:
        """Start a process for each of `joins`; each runs `stage_process.compute_stage`. `ended(stage, why)` is called on the
        event loop when a process has ended or could not be started."""
        ...

    async def close(self) -> None:
        """Kill the processes."""
        ...


class StageFailed(Exception):
    """Error: a stage could not be built. `kind`: class name of the error in the stage's process."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class _Far:
    """State of the process of one stage, since its start."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage = stage
        self.place = f"stage {stage} of {num_stages}"
        self.joined: asyncio.Future[Joined] = asyncio.get_running_loop().create_future()
        self.built: asyncio.Future[Built] = asyncio.get_running_loop().create_future()
        self.connection: PeerConnection | None = None
        self.runner: FarRunner | None = None

    def fail(self, error: Exception) -> None:
        for future in (self.joined, self.built):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks the exception as retrieved: only one of both futures may be awaited


class StageProcesses:
    """Processes of one model's stages, except the first. `source`: location of the model's files on each host."""

    def __init__(self, launcher: Launcher, source: ModelName) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.host = launcher.host
        self._launcher, self._source = launcher, source
        self._far: list[_Far] = []
        self._server: asyncio.Server | None = None
        self._lose: Callable[[BaseException], None] = lambda error: None
        self._is_closed = False

    async def begin(self, num_stages: int) -> None:
        """Start the processes and wait until all have joined. Raises ProcessGone if a process has ended, or OSError if this
        process cannot listen."""
        self._far = [_Far(stage, num_stages) for stage in range(1, num_stages)]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: PeerConnection(self.secret, self._on_message, self._disconnected, connects=False), self.host, 0
        )
        port = self._server.sockets[0].getsockname()[1]
        self._launcher.begin([Join(each.stage, self.host, port, self.secret) for each in self._far], self._ended)
        for each in self._far:
            joined = await each.joined
            each.place = joined.place
            log.info("stage %d of %d is computed by %s", each.stage, num_stages, joined.place)

    async def build(self, config: EngineConfig, links: tuple[str, int]) -> list[Built]:
        """Build these stages and return their replies. `links`: address of the first stage. Raises StageFailed or ProcessGone."""
        for each in self._far:
            assert each.connection is not None
            each.connection.send(Build(config, self._source, self.addresses(links)))
        return [await each.built for each in self._far]

    def addresses(self, links: tuple[str, int]) -> tuple[tuple[str, int], ...]:
        """Return the addresses at which all stages listen. `links`: that of the first. All processes must have joined."""
        return (links, *[each.joined.result().links for each in self._far])

    def runners(self, beside: Runner) -> list[FarRunner]:
        """Return the runners of these stages. `beside`: runner of the first stage, which is in this process."""
        for each in self._far:
            assert each.connection is not None
            each.runner = FarRunner(each.connection, each.place, beside)
        return [each.runner for each in self._far if each.runner is not None]

    def when_lost(self, call: Callable[[BaseException], None]) -> None:
        """Set the function that is called on the event loop with an error when a process ends."""
        self._lose = call

    async def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for each in self._far:
            if each.connection is not None:
                each.connection.abort()
        await self._launcher.close()

    # --- receiving ------------------------------------------------------------------------------------------------

    def _on_message(self, connection: PeerConnection, message: Any) -> None:
        if isinstance(message, Joined):
            far = self._far[message.stage - 1]
            far.connection = connection
            far.joined.set_result(message)
            return
        far = next(each for each in self._far if each.connection is connection)
        match message:
            case Built():
                far.built.set_result(message)
            case NotBuilt(kind, text):
                far.fail(StageFailed(kind, text))
            case _:
                assert far.runner is not None
                far.runner.on_message(message)

    def _disconnected(self, connection: PeerConnection) -> None:
        for far in self._far:
            if far.connection is connection:
                self._ended(far.stage, "its connection has ended")

    def _ended(self, stage: int, why: str) -> None:
        far = self._far[stage - 1]
        if far.runner is None:
            error = ProcessGone(f"{far.place}: {why}")
            far.fail(error)
            return
        error = far.runner.lost(why)
        if not self._is_closed:
            self._lose(error)


class RunnersOverProcesses(StageRunners):
    """Combined runner of all stages; the first stage is in this process. `close` also ends the other processes."""

    def __init__(self, processes: StageProcesses, *more: Any) -> None:
        """Create the runner. `more`: arguments of `StageRunners.__init__`."""
        super().__init__(*more)
        self._processes = processes

    async def close(self) -> bool:
        try:
            return await super().close()
        finally:
            await self._processes.close()
