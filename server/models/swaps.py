"""Swaps: serves several models of which only some are loaded at a time, and decides which model to load and unload.

Requests for unloaded models wait in one queue; the first request determines the next model to load. The least recently used model
is unloaded. It accepts no new requests and finishes those in progress, so no answer is cut off. A loaded model stays loaded at
least as long as the last swap took, unless it is idle. At most half of the time is therefore spent on swaps. After a load, all
requests waiting for the model start together.

Files are downloaded and read before memory is freed. If a model cannot be loaded, only requests for that model fail. The model that
was unloaded for it is loaded again, and the failed model is not retried for a while.

A request keeps the models that it uses loaded until its Call ends. All of this runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from runtime.api import EngineClient, Metric, QueueFull, SleepLevel
from server.http.call import Call
from server.http.errors import DeadlineExceeded, ModelFailed, Unavailable

logger = logging.getLogger("oneloop.load")

CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]
TRY_AGAIN_S, MAX_TRY_AGAIN_S = 60.0, 3600.0  # after a model could not be loaded; twice as long after each time more
RETRY_WHILE_SWAPPING_S = 1


class SwapStatus(StrEnum):
    """Status of a model that is loaded and unloaded on demand, in llama.cpp's words."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"


class Outline(NamedTuple):
    """Facts about a model that was never loaded. `max_model_len`: context in tokens, if memory suffices. `modalities`: inputs
    besides text. `tasks`: supported tasks, as in `ModelCard`. `chats`: whether its files contain a chat template."""

    max_model_len: int
    modalities: tuple[str, ...]
    tasks: tuple[str, ...]
    chats: bool


class SwapState(Protocol):
    """Members of a loaded model that `Swaps` uses."""

    @property
    def engine(self) -> EngineClient: ...


M = TypeVar("M", bound=SwapState)
M_co = TypeVar("M_co", bound=SwapState, covariant=True)


class ModelLoader(Protocol[M_co]):
    """Loader of one model, in up to three steps."""

    async def prepare(self) -> None:
        """Read the model's files and tokenizer, without using device memory. Raises LoadError."""
        ...

    async def outline(self) -> Outline | None:
        """Return the model's outline, read from its files without the weights; None if the files do not suffice."""
        ...

    async def load(self) -> M_co:
        """Load the model with its engine, and return it. Called after `prepare`. Raises LoadError."""
        ...


@dataclass(eq=False, slots=True)
class _Waiter(Generic[M]):
    model: SwappedModel[M]
    caller: bytes | None
    entered: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class SwappedModel(Generic[M]):
    """Model that is loaded and unloaded on demand. `loaded`: the model, set after the first load; its engine sleeps while the
    model is unloaded. `num_users`: number of requests that use the model. `is_open`: whether it accepts new requests. `outline`:
    facts from its files, before the first load."""

    name: str
    source: ModelLoader[M]
    swaps: Swaps[M]
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    loaded: M | None = None
    outline: Outline | None = None
    status: SwapStatus = SwapStatus.UNLOADED
    failure: str | None = None  # why the last try failed
    is_open: bool = False
    num_users: int = 0
    num_swaps: int = 0  # times that it came in place of another
    swap_s: float = 0.0  # what that took, in all
    num_failures: int = 0
    used: int = 0  # number of its last use, of all models' uses
    since_s: float = 0.0  # when it was opened
    try_again_s: float = 0.0  # not before, where a try failed
    patience_s: float = TRY_AGAIN_S  # after the next one that fails
    waiting: deque[_Waiter[M]] = field(default_factory=deque)
    preparing: asyncio.Task[None] | None = None
    is_prepared: bool = False

    @property
    def is_untouched(self) -> bool:
        """Return whether the model has never been loaded and no request waits for it."""
        return (
            self.loaded is None and self.status is SwapStatus.UNLOADED and self.preparing is None and not self.waiting
        )

    async def once_loaded(self, call: Call) -> M:
        """Return the model. If it has never been loaded, load it first. Raises ApiError or QueueFull."""
        if self.loaded is None:
            await self.enter(call)
        assert self.loaded is not None, "it was entered"
        return self.loaded

    async def enter(self, call: Call, deadline_s: float | None = None) -> None:
        """Wait until the model is loaded. It then stays loaded until `call` ends. `deadline_s`: latest time by the monotonic
        clock; None uses the call's deadline. Raises ModelFailed, Unavailable, DeadlineExceeded, QueueFull, or ClientLeft if the
        client has disconnected."""
        if call.holds(self):
            return
        if not self.swaps.takes(self):
            limit_s = call.deadline_s() if deadline_s is None else deadline_s
            await call.while_waited_for(self.swaps.wait(self, call.caller, limit_s))
        call.hold(self, lambda: self.swaps.left(self))


class Swaps(Generic[M]):
    """Models of which only some are loaded at a time. `level`: sleep level of unloaded models. `max_waiting`: maximum number of
    waiting requests of all callers together. `max_wait_s`: maximum duration of each wait. `clock`, `call_later`: monotonic time,
    and timers by it."""

    def __init__(
        self,
        sources: Sequence[tuple[str, ModelLoader[M]]],
        *,
        max_loaded: int = 1,
        level: SleepLevel = SleepLevel.HOST,
        max_waiting: int = 256,
        max_wait_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater | None = None,
    ) -> None:
        self.models = [SwappedModel(name, source, self) for name, source in sources]
        self._max_loaded = max_loaded
        self._level = level
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._call_later = call_later or asyncio.get_running_loop().call_later
        self._line: list[_Waiter[M]] = []  # for whatever model, in their order
        self._num_uses = 0
        self._swap_s = 0.0  # what the last one took
        self._changed = asyncio.Event()
        self._residence: asyncio.TimerHandle | None = None  # of the one that is to make room, its end
        self._swapping: asyncio.Task[None] | None = None
        self._outlining: asyncio.Task[None] | None = None
        self._is_closed = False
        self._when_loaded: list[Callable[[M], object]] = []

    def find(self, name: str) -> SwappedModel[M] | None:
        return next((model for model in self.models if model.name == name), None)

    def add(self, name: str, source: ModelLoader[M]) -> SwappedModel[M]:
        """Add a model that is loaded when a request names `name`. `source`: its loader."""
        model = SwappedModel(name, source, self)
        self.models.append(model)
        return model

    def remove(self, model: SwappedModel[M]) -> None:
        """Remove a model whose `is_untouched` is true."""
        self.models.remove(model)

    def when_loaded(self, call: Callable[[M], object]) -> None:
        """Register `call` to be called with each model after its first load, before the model accepts requests."""
        self._when_loaded.append(call)

    def begin_with(self, model: SwappedModel[M], loaded: M) -> None:
        """Register `loaded` as the model loaded at the start, and begin to read the outlines of the other models."""
        model.loaded, model.is_prepared = loaded, True
        self._open(model)
        self._outlining = _begin(self._outline(), "outlines")

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a model to be loaded."""
        return len(self._line)

    @property
    def resident(self) -> list[SwappedModel[M]]:
        return [model for model in self.models if model.status is SwapStatus.LOADED]

    # --- requests -------------------------------------------------------------------------------------------------

    def takes(self, model: SwappedModel[M]) -> bool:
        """Return whether a request can use `model` at once. If so, count the request as a user of `model`."""
        if model.is_open and not self._is_closed:
            self._use(model)
        return model.is_open and not self._is_closed

    def left(self, model: SwappedModel[M]) -> None:
        """Count one user of `model` less. Called when a request that used `model` ends."""
        model.num_users -= 1
        self._changed.set()

    async def wait(self, model: SwappedModel[M], caller: bytes | None, deadline_s: float | None) -> None:
        """Wait until the request may use `model`. Raises the errors of `SwappedModel.enter`."""
        self._check(model, caller, deadline_s)
        waiter = _Waiter(model, caller, asyncio.get_running_loop().create_future())
        model.waiting.append(waiter)
        self._line.append(waiter)
        alarm = self._alarm(waiter, deadline_s)
        if not model.is_prepared and model.preparing is None:
            model.preparing = _begin(self._prepare(model), "prepare")
        if self._swapping is None:
            self._swapping = _begin(self._swap_while_wanted(), "swaps")
        self._changed.set()
        try:
            await waiter.entered
        except BaseException:
            if waiter in self._line:
                self._forget(waiter)
            elif waiter.entered.done() and not waiter.entered.cancelled() and waiter.entered.exception() is None:
                self.left(model)  # it was let in when its client left
            raise
        finally:
            if alarm is not None:
                alarm.cancel()

    def _check(self, model: SwappedModel[M], caller: bytes | None, deadline_s: float | None) -> None:
        if self._is_closed:
            raise Unavailable("The server is shutting down")
        if model.failure is not None and (left_s := model.try_again_s - self._clock()) > 0:
            raise ModelFailed(model.name, model.failure, left_s)
        if deadline_s is not None and deadline_s <= self._clock():
            raise _late()
        num = len(self._line)
        if num >= self._max_waiting:
            callers = [waiter.caller for waiter in self._line]
            share = max(1, self._max_waiting // len({*callers, caller}))
            if callers.count(caller) >= share or num >= 2 * self._max_waiting:
                raise QueueFull(num, self._max_waiting, retry_after_s=max(1.0, self._swap_s))

    def _alarm(self, waiter: _Waiter[M], deadline_s: float | None) -> asyncio.TimerHandle | None:
        """Start the timer that ends the wait of `waiter`, if a time limit applies."""
        limits: list[tuple[float, Exception]] = []
        if deadline_s is not None:
            limits.append((deadline_s - self._clock(), _late()))
        if self._max_wait_s is not None:
            busy = Unavailable(
                "The server is busy: the request has waited too long for its model",
                retry_after_s=RETRY_WHILE_SWAPPING_S,
            )
            limits.append((self._max_wait_s, busy))
        if not limits:
            return None
        delay_s, error = min(limits, key=lambda limit: limit[0])
        return self._call_later(delay_s, lambda: _fail(waiter, error))

    def _forget(self, waiter: _Waiter[M]) -> None:
        """Remove a waiter whose client has disconnected or whose deadline has passed."""
        waiter.model.waiting.remove(waiter)
        self._line.remove(waiter)
        self._changed.set()

    def _use(self, model: SwappedModel[M]) -> None:
        self._num_uses += 1
        model.used = self._num_uses
        model.num_users += 1

    # --- swaps ----------------------------------------------------------------------------------------------------

    async def _prepare(self, model: SwappedModel[M]) -> None:
        try:
            await model.source.prepare()
        except Exception as error:
            self._failed(model, error)
        else:
            model.is_prepared = True
        finally:
            model.preparing = None
            self._changed.set()

    async def _outline(self) -> None:
        for model in self.models:
            if model.loaded is None:
                model.outline = await model.source.outline()

    async def _swap_while_wanted(self) -> None:
        try:
            while self._line:
                self._changed.clear()
                model = next((waiter.model for waiter in self._line if waiter.model.is_prepared), None)
                if model is None or not await self._bring(model):
                    await self._changed.wait()
        finally:
            self._swapping = None

    async def _bring(self, model: SwappedModel[M]) -> bool:
        """Load `model` and start its waiting requests. Return False if another model must become idle and be unloaded first."""
        leaving: SwappedModel[M] | None = None
        if model.status is not SwapStatus.LOADED:
            resident = self.resident
            if len(resident) >= self._max_loaded:
                leaving = self._leaving(resident)
                if leaving is None or leaving.num_users:
                    return False
                leaving.is_open = False
            await self._swap(model, leaving)
        elif not model.is_open:
            self._open(model)  # closed to be unloaded, but the waiting requests have left
        self._let_in(model)
        return True

    def _leaving(self, resident: Sequence[SwappedModel[M]]) -> SwappedModel[M] | None:
        """Return the model to unload, or None if none can be unloaded yet. Idle models come first, then models that already
        reject requests, then the least recently used model. If the least recently used model was open long enough, it stops
        accepting requests."""
        by_use = sorted(resident, key=lambda model: model.used)
        for is_it in (lambda each: not each.num_users, lambda each: not each.is_open):
            if (found := next(filter(is_it, by_use), None)) is not None:
                return found
        oldest = by_use[0]
        left_s = oldest.since_s + self._swap_s - self._clock()
        if left_s > 0:
            if self._residence is not None:
                self._residence.cancel()
            self._residence = self._call_later(left_s, self._changed.set)
            return None
        oldest.is_open = False
        return oldest

    async def _swap(self, model: SwappedModel[M], leaving: SwappedModel[M] | None) -> None:
        began_s = self._clock()
        model.status = SwapStatus.LOADING
        try:
            if leaving is not None:
                await self._put_to_sleep(leaving)
            await self._wake(model)
        except Exception as error:
            model.status = SwapStatus.UNLOADED
            self._failed(model, error)
            if leaving is not None and leaving.status is not SwapStatus.LOADED:
                await self._bring_back(leaving)
            return
        self._swap_s = self._clock() - began_s
        model.swap_s += self._swap_s
        model.num_swaps += 1
        logger.info(
            "%s is loaded%s, after %.1f s", model.name, f" in place of {leaving.name}" if leaving else "", self._swap_s
        )
        self._open(model)

    async def _put_to_sleep(self, model: SwappedModel[M]) -> None:
        assert model.loaded is not None, "it was loaded"
        engine = model.loaded.engine
        while engine.health().sleep_level < self._level:  # again, should somebody else have woken it meanwhile
            await engine.sleep(self._level)
        model.status = SwapStatus.UNLOADED

    async def _wake(self, model: SwappedModel[M]) -> None:
        if model.loaded is not None:
            await model.loaded.engine.wake_up()
            return
        loaded = await model.source.load()
        for call in self._when_loaded:
            call(loaded)
        model.loaded = loaded

    async def _bring_back(self, model: SwappedModel[M]) -> None:
        """Load `model` again after the model that replaced it failed to load."""
        model.status = SwapStatus.LOADING
        try:
            await self._wake(model)
        except Exception as error:
            model.status = SwapStatus.UNLOADED
            self._failed(model, error)
        else:
            self._open(model)
            self._let_in(model)

    def _open(self, model: SwappedModel[M]) -> None:
        model.status, model.is_open, model.since_s = SwapStatus.LOADED, True, self._clock()
        model.failure, model.patience_s = None, TRY_AGAIN_S

    def _let_in(self, model: SwappedModel[M]) -> None:
        """Start all requests that wait for `model`, as long as it accepts requests."""
        while model.is_open and model.waiting:
            waiter = model.waiting.popleft()
            self._line.remove(waiter)
            if not waiter.entered.done():
                self._use(model)
                waiter.entered.set_result(None)

    def _failed(self, model: SwappedModel[M], error: Exception) -> None:
        logger.error("%s could not be loaded: %s", model.name, error, exc_info=not str(error))
        model.failure, left_s = str(error) or type(error).__name__, model.patience_s
        model.try_again_s, model.patience_s = self._clock() + left_s, min(2 * left_s, MAX_TRY_AGAIN_S)
        model.num_failures += 1
        model.is_prepared = model.loaded is not None  # its files may be others when it is tried again
        self._end(model, lambda: ModelFailed(model.name, model.failure or "", left_s))

    def _end(self, model: SwappedModel[M], error: Callable[[], Exception]) -> None:
        while model.waiting:
            waiter = model.waiting.popleft()
            self._line.remove(waiter)
            _fail(waiter, error())

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Reject new requests, and let waiting requests fail."""
        self._is_closed = True
        for model in self.models:
            self._end(model, lambda: Unavailable("The server is shutting down"))
        for task in (self._swapping, self._outlining, *(model.preparing for model in self.models)):
            if task is not None:
                task.cancel()
        if self._residence is not None:
            self._residence.cancel()

    def metrics(self, model: SwappedModel[M]) -> list[Metric]:
        """Return the metrics of `model`."""
        return [
            Metric("model_loaded", "1 while the model is loaded.", "gauge", {(): float(model.status is SwapStatus.LOADED)}),
            Metric(
                "num_requests_waiting_for_model", "Requests that wait until the model is loaded.", "gauge",
                {(): float(len(model.waiting))},
            ),
            Metric("model_swaps", "Loads of the model in place of another.", "counter", {(): float(model.num_swaps)}),
            Metric("model_swap_seconds", "Seconds of these loads.", "counter", {(): model.swap_s}),
            Metric(
                "model_load_failures", "Failed loads of the model.", "counter", {(): float(model.num_failures)}
            ),
        ]  # fmt: skip


def _begin(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task with an empty context. It works for all requests, so it must not inherit one request's."""
    return asyncio.create_task(work, name=name, context=Context())


def _fail(waiter: _Waiter[M], error: Exception) -> None:
    if not waiter.entered.done():
        waiter.entered.set_exception(error)


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("The answer was not complete when the request's time was over")
