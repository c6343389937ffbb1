"""Process of one pipeline stage. The process of the first stage runs the engine loop and sends it steps.

It connects to that process, builds its stage, and launches received steps on its ranks, as `StageRunners` does for stages on
threads. It ends when the connection is closed."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from runtime.config import PlanError
from runtime.fault import RowFailed
from runtime.models.spec.model import UnsupportedModel
from runtime.parallel.connection import PeerConnection
from runtime.parallel.group import Apart
from runtime.parallel.links import LinkPort
from runtime.parallel.messages import (
    Await,
    Build,
    Close,
    Failed,
    Forget,
    Join,
    Joined,
    NotBuilt,
    PromptLogprobsDone,
    StepDone,
    Work,
    with_arrays,
)
from runtime.parallel.stages import PipelineStage, Turn
from runtime.start.plan import SharedDevice
from runtime.start.stages import build_stage, built_stage
from runtime.step import ForwardOutput, GpuEvent, Runner, SharedEvent, Step
from runtime.weights.fetch import resolve
from runtime.weights.rules import WeightsError

log = logging.getLogger("oneloop.stage")


async def compute_stage(join: Join) -> None:
    """Compute a stage until the connection is closed. Raises OSError if the process of the first stage cannot be reached."""
    await _StageProcess(join).run()


class _Serving(NamedTuple):
    """A stage that has been built. `stages`: its `PipelineStage` objects, by rank."""

    runner: Runner
    stages: list[PipelineStage]
    close: Callable[[], Any]


class _StageProcess:
    def __init__(self, join: Join) -> None:
        self._join = join
        self._loop = asyncio.get_running_loop()
        self._connection = PeerConnection(join.secret, self._on_message, self._lost, connects=True)
        self._build: asyncio.Future[Build] = self._loop.create_future()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._port: LinkPort | None = None
        self._serving: _Serving | None = None
        self._outputs: dict[int, ForwardOutput | BaseException] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        join = self._join
        transport, _ = await self._loop.create_connection(lambda: self._connection, join.host, join.port)
        host = transport.get_extra_info("sockname")[0]
        port = self._port = LinkPort(host, join.secret)
        self._connection.send(
            Joined(join.stage, port.address, f"process {os.getpid()} on {socket.gethostname()} ({host})")
        )
        try:
            either: list[asyncio.Future[Any]] = [self._build, self._over]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._build.done() and await self._built(self._build.result(), port):
                await self._over
        finally:
            port.close()
            if self._serving is not None:
                await self._serving.close()
            self._connection.close()

    async def _built(self, build: Build, port: LinkPort) -> bool:
        """Build the stage and return True. If that fails, send the reason to the first process and return False."""
        source = build.source
        try:
            files = await asyncio.to_thread(
                resolve, source.model, source.revision, _quiet, load_format=build.config.load_format
            )
            own, (ranks,) = await build_stage(
                build.config, files, _quiet, SharedDevice(), self._join.stage, port, build.links
            )
        except (PlanError, UnsupportedModel, WeightsError) as error:
            self._connection.send(NotBuilt(type(error).__name__, str(error)))
            return False
        except Exception as error:
            log.exception("stage %d could not be built", self._join.stage)
            self._connection.send(NotBuilt("", traceback.format_exception_only(error)[-1].strip()))
            return False
        (runner,) = own.runners([ranks])
        (stages,) = own.stages

        async def close() -> None:
            own.end()
            await runner.close()

        self._serving = _Serving(runner, stages, close)
        self._connection.send(built_stage(ranks))
        gc.collect()
        gc.freeze()
        return True

    # --- receiving ------------------------------------------------------------------------------------------------

    def _lost(self, connection: PeerConnection) -> None:
        if not self._over.done():
            self._over.set_result(None)
        if self._port is not None and self._serving is None:
            self._port.close()  # the build need not wait for other stages any more

    def _on_message(self, connection: PeerConnection, message: Any) -> None:
        match message:
            case Build():
                self._build.set_result(message)
            case Work():
                self._work(message)
            case Await(number, of):
                output = self._outputs[of]
                if isinstance(output, BaseException):
                    self._failed(number, output)
                else:
                    self._when(output.done(), number, lambda: self._connection.send(StepDone(number)))
            case Forget(of):
                self._outputs.pop(of, None)
            case Close():
                self._lost(connection)

    def _work(self, work: Work) -> None:
        serving, output = self._serving, None if work.of is None else self._outputs[work.of]
        assert serving is not None, "it was built"
        for stage in serving.stages:
            stage.next = work.turn
        try:
            if isinstance(output, BaseException):
                raise output
            if work.to_sample:
                self._outputs[work.number] = (
                    serving.runner.launch_forward(work.batch) if output is None else output.snapshot_logits(work.batch)
                )
                return
            if output is None:
                step = serving.runner.launch(work.batch)
            else:
                assert work.masks is not None
                step = output.sample(work.batch, work.masks)
        except Exception as error:
            if work.to_sample:
                self._outputs[work.number] = error
            else:
                self._failed(work.number, error)
        else:
            self._when(step.done, work.number, partial(self._done, work.number, step))
        finally:
            for stage in serving.stages:
                stage.next = Turn()

    # --- sending --------------------------------------------------------------------------------------------------

    def _when(self, event: GpuEvent, number: int, tell: Callable[[], None]) -> None:
        """Call `tell` when `event` (a SharedEvent) has passed. If it failed, report its error as the end of step `number`."""
        cast("SharedEvent", event).when_passed(lambda error: tell() if error is None else self._failed(number, error))

    def _done(self, number: int, step: Step) -> None:
        try:
            done = StepDone(number, with_arrays(step.read()), step.idle_before_s(), step.was_captured())
        except Exception as error:
            self._failed(number, error)
            return
        self._connection.send(done)
        if step.read_prompt_logprobs is not None:
            task = self._loop.create_task(self._tell_of_prompts(number, step))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_of_prompts(self, number: int, step: Step) -> None:
        try:
            self._connection.send(PromptLogprobsDone(number, await step.prompt_logprobs()))
        except Exception as error:
            self._failed(number, error)

    def _failed(self, number: int, error: BaseException) -> None:
        assert self._serving is not None
        notes = tuple(getattr(error, "__notes__", ()))
        row = error.number if isinstance(error, RowFailed) else None
        if row is None and not isinstance(error, Apart):
            log.error("a step failed", exc_info=error)
        fault = self._serving.runner.fault(error)
        self._connection.send(
            Failed(number, fault, f"{type(error).__name__}: {error}", notes, row, isinstance(error, Apart))
        )


def _quiet(progress: object) -> None:
    """Ignore progress, because the process of the first stage reports its own."""
