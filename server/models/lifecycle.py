"""Lifecycle: whether the server is loading, ready, draining or failed, and the models that it serves.

Only the code that starts the process changes it. Handlers call `require_model()`, which returns the model or raises the error
for the client. TokenProbe checks whether the engine still generates tokens, once for all simultaneous callers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum

from runtime.api import EngineClient, EngineError, LoadProgress
from server.config.server_config import ServerConfig
from server.http.errors import Unavailable
from server.models.model import LoadedModel
from server.models.swaps import RETRY_WHILE_SWAPPING_S

RETRY_WHILE_LOADING_S = 5
RETRY_AFTER_DRAIN_S = 10
LIMIT_S = 20.0  # for a token
REUSE_S = 1.0  # an answer is good for so long


Report = Callable[[LoadProgress], None]
Load = Callable[[ServerConfig, Report, threading.Event], Awaitable[LoadedModel]]  # the event, once set, ends a download


class LoadError(Exception):
    """Error: the model cannot be loaded or served. The message gives the reason, so no traceback is needed."""


class LoadPhase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Lifecycle:
    def __init__(self) -> None:
        self.phase = LoadPhase.LOADING
        self.progress = LoadProgress("start")
        self.reason: str | None = None  # why it failed
        self.stopping = asyncio.Event()  # set to end the process gracefully
        self._loaded: LoadedModel | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._when_draining: list[Callable[[], object]] = []
        self._when_loaded: list[Callable[[LoadedModel], object]] = []

    def report(self, progress: LoadProgress) -> None:
        """Store `progress`, the progress of loading. Callable from any thread."""
        self.progress = progress

    def ready(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        for each in loaded.all:
            self._joins(each)
        if loaded.swapped is not None:
            loaded.swapped.swaps.when_loaded(self._joins)
            self.when_draining(loaded.swapped.swaps.close)
        if self.phase is LoadPhase.LOADING:
            self.phase = LoadPhase.READY

        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _joins(self, loaded: LoadedModel) -> None:
        for call in self._when_loaded:
            call(loaded)

    async def until_loaded(self) -> None:
        """Wait until a model is loaded. Waits for ever if no model is loaded."""
        if self._loaded is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def when_loaded(self, call: Callable[[LoadedModel], object]) -> None:
        """Register `call` to be called with each model before it accepts requests; immediately for loaded models."""
        self._when_loaded.append(call)
        for each in () if self._loaded is None else self._loaded.all:
            call(each)

    def when_draining(self, call: Callable[[], object]) -> None:
        """Register `call` to be called when the server stops accepting requests."""
        self._when_draining.append(call)

    def drain(self) -> None:
        self.phase = LoadPhase.DRAINING
        for call in self._when_draining:
            call()

    def fail(self, reason: str) -> None:
        self.phase, self.reason = LoadPhase.FAILED, reason

    @property
    def loaded(self) -> LoadedModel | None:
        """The loaded model, even if the server does not accept requests; None before it is loaded."""
        return self._loaded

    def require_model(self) -> LoadedModel:
        """Return the loaded model. Raises Unavailable if the server does not accept requests."""
        if self.phase is LoadPhase.READY and self._loaded is not None:
            return self._loaded
        if self.phase is LoadPhase.FAILED:
            raise Unavailable("The model could not be loaded; see the server's log")
        if self.phase is LoadPhase.DRAINING:
            raise Unavailable("The server is shutting down", retry_after_s=RETRY_AFTER_DRAIN_S)
        raise Unavailable(f"The model is still loading ({self.progress.phase})", retry_after_s=RETRY_WHILE_LOADING_S)

    def require_resident(self) -> tuple[LoadedModel, ...]:
        """Return the models that are loaded now. Raises Unavailable if there are none."""
        resident = self.require_model().resident
        if not resident:
            raise Unavailable(
                "No model is loaded at the moment: the server is exchanging models",
                retry_after_s=RETRY_WHILE_SWAPPING_S,
            )
        return resident

    async def death(self) -> str:
        """Wait until any engine fails, including engines loaded later. Return the reason."""
        joined = asyncio.Event()
        self.when_loaded(lambda loaded: joined.set())
        deaths: dict[EngineClient, asyncio.Task[str]] = {}
        news: asyncio.Task[bool] | None = None
        try:
            while True:
                joined.clear()
                for engine in () if self._loaded is None else self._loaded.engines:
                    if engine not in deaths:
                        deaths[engine] = asyncio.create_task(engine.death(), name="death")
                news = asyncio.create_task(joined.wait())
                done, _ = await asyncio.wait({news, *deaths.values()}, return_when=asyncio.FIRST_COMPLETED)
                if (dead := next((task for task in deaths.values() if task in done), None)) is not None:
                    return dead.result()
        finally:
            for task in (news, *deaths.values()):
                if task is not None:
                    task.cancel()

    def health(self) -> tuple[int, Mapping[str, object]]:
        """Return HTTP status and body of /health. It is 200 only while requests are accepted and steps complete."""
        if self.phase is LoadPhase.LOADING:
            progress = self.progress
            body = {"phase": progress.phase, "done": progress.done, "total": progress.total, "unit": progress.unit}
            return 503, {"status": "loading", **body}
        if self.phase is LoadPhase.FAILED or self._loaded is None:
            return 503, {"status": "failed", "reason": self.reason}
        engine = self._loaded.engines.health()
        counts = {"running": engine.num_running, "waiting": engine.num_waiting + self._loaded.num_waiting}
        if not engine.ok:
            return 503, {"status": "failed", "reason": engine.reason, **counts}
        if self.phase is LoadPhase.DRAINING:
            return 503, {"status": "draining", **counts}
        if engine.sleep_level and self._loaded.resident:
            counts["sleep_level"] = int(engine.sleep_level)
        own = self._loaded.swapped
        models = {} if own is None else {"models": {each.name: each.status.value for each in own.swaps.models}}
        return 200, {"status": "ok", **counts, **models}

    def liveness(self) -> tuple[int, Mapping[str, object]]:
        """Return HTTP status and body of /health/live. The status is 503 only if the server cannot recover."""
        if self.phase is LoadPhase.FAILED:
            return 503, {"status": "failed", "reason": self.reason}
        engine = None if self._loaded is None else self._loaded.engines.health()
        if engine is not None and engine.hopeless:
            return 503, {"status": "failed", "reason": engine.reason}
        return 200, {"status": "ok" if self.phase is LoadPhase.READY else self.phase}

    def steps_fail(self) -> bool:
        """Return whether the server accepts requests although one step after another has failed."""
        return (
            self.phase is LoadPhase.READY
            and self._loaded is not None
            and any(engine.health().failing for engine in self._loaded.engines)
        )


class TokenProbe:
    """Probe that generates one token to check an engine. Simultaneous callers share one probe. `clock`: returns seconds."""

    def __init__(
        self, limit_s: float = LIMIT_S, reuse_s: float = REUSE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._reuse_s = reuse_s
        self._clock = clock
        self._task: asyncio.Task[str | None] | None = None
        self._ended_s = 0.0

    async def failure(self, engine: EngineClient) -> str | None:
        """Return the reason why `engine` generated no token within the time limit; None if it generated one."""
        # Shielded: others wait for it as well.
        return await asyncio.shield(self.begin(engine))

    def begin(self, engine: EngineClient) -> asyncio.Task[str | None]:
        """Return the task of the running probe, of the last probe if it is recent, or of a new probe."""
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
