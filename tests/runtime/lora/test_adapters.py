"""Adapters beside a running engine: who waits for one holds nobody up, names change under requests, and what fails ends its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import TypeVar

import pytest

from runtime.api import AdapterGone, AdapterRefused, FinishReason, Request, SamplingParams, SleepLevel
from runtime.config import LoraLimits
from runtime.lora.adapters import Adapters
from runtime.weights.rules import WeightsError
from tests.fake_runner import FakeRunner
from tests.runtime.test_engine import engine_on, read, turns

T = TypeVar("T")


class Store:
    """Reads take as long as `gate` is closed, and fail for paths that are `broken`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.began, self.gone = threading.Event(), threading.Event()
        self.broken: set[str] = set()
        self.kept: set[int] = set()
        self.forgotten: list[int] = []
        self.is_there = True

    def read(self, key: int, path: str) -> SimpleNamespace:
        self.began.set()
        assert self.gate.wait(60)
        if path in self.broken:
            raise WeightsError(f"{path}: lora_A is too wide")
        if self.is_there:
            self.kept.add(key)
        return SimpleNamespace(base="base", max_rank=4, num_parameters=8)

    def drop(self, key: int) -> None:
        self.kept.discard(key)

    def has(self, key: int) -> bool:
        return key in self.kept

    def leave(self) -> None:
        self.is_there = False
        self.kept.clear()

    def enter(self, fresh: Store) -> None:
        self.is_there = fresh.is_there

    def forget(self, key: int) -> None:
        self.kept.discard(key)
        self.forgotten.append(key)
        self.gone.set()


def serving(store: Store, max_loras: int = 1, max_cpu_loras: int = 1) -> Adapters:
    return Adapters(LoraLimits(max_loras, max_cpu_loras, 8), store)


def request(adapter, name: str = "r", max_tokens: int = 3) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens), adapter=adapter)


async def begun(store: Store) -> None:
    await asyncio.to_thread(store.began.wait, 60)


async def test_who_waits_for_an_adapter_holds_nobody_up():
    store = Store()
    adapters = serving(store)
    async with engine_on(FakeRunner(), adapters=adapters) as engine:
        first = await adapters.load("first", "a")
        second = await adapters.load("second", "b")  # the first has to make room
        assert store.kept == {second.key}
        store.gate.clear()
        store.began.clear()
        waits = asyncio.create_task(read(engine.submit([request(first)])))
        await begun(store)
        assert (await read(engine.submit([request(None)])))[0][1] is FinishReason.LENGTH
        assert not waits.done()
        store.gate.set()
        assert (await waits)[0] == ([3, 4, 5], FinishReason.LENGTH)
        assert store.kept == {first.key}


async def test_an_adapter_that_cannot_be_read_again_ends_who_waits_for_it():
    store = Store()
    adapters = serving(store)
    async with engine_on(FakeRunner(), adapters=adapters) as engine:
        first = await adapters.load("first", "a")
        await adapters.load("second", "b")
        store.broken.add("a")
        async with engine.submit([request(first)]) as stream:
            ((output,),) = [outputs async for outputs in stream]
        assert output.finish is FinishReason.ERROR
        assert "could not be read again: a: lora_A is too wide" in output.error
        store.broken.clear()
        assert (await read(engine.submit([request(first)])))[0][1] is FinishReason.LENGTH


async def test_a_bad_adapter_is_refused_and_nothing_else_notices():
    store = Store()
    adapters = serving(store)
    async with engine_on(FakeRunner(), adapters=adapters) as engine:
        good = await adapters.load("name", "a")
        store.broken.add("b")
        with pytest.raises(AdapterRefused, match="too wide"):
            await adapters.load("name", "b")
        assert adapters.find("name") == good
        assert (await read(engine.submit([request(good)])))[0][1] is FinishReason.LENGTH
        assert store.forgotten == [2]


async def computed(runner: FakeRunner, wanted: Awaitable[T]) -> T:
    """The result of `wanted`, all steps until then having been computed, and none afterwards."""
    waiting = asyncio.ensure_future(wanted)
    while not waiting.done():
        for event in runner.events:
            if not event.is_done():
                event.complete()
        await asyncio.sleep(0)
    return await waiting


async def test_unloading_waits_for_the_last_request_and_takes_no_new_one():
    store, runner = Store(), FakeRunner(manual=True)
    adapters = serving(store)
    async with engine_on(runner, adapters=adapters) as engine:
        adapter = await adapters.load("name", "a")
        runs = asyncio.create_task(read(engine.submit([request(adapter)])))
        await asyncio.sleep(0)
        unloading = asyncio.create_task(adapters.unload("name"))
        await asyncio.sleep(0)
        assert adapters.find("name") is None
        with pytest.raises(AdapterGone):
            engine.submit([request(adapter)])
        assert not unloading.done()
        assert (await computed(runner, runs))[0][1] is FinishReason.LENGTH
        assert await unloading
        assert store.kept == set()
        assert not await adapters.unload("name")


async def test_what_is_loaded_under_a_name_anew_is_another_adapter():
    """With other blocks in the prefix cache; who runs with the old one keeps it to the end."""
    store, runner = Store(), FakeRunner(manual=True)
    adapters = serving(store, 2, 2)
    async with engine_on(runner, adapters=adapters) as engine:
        old = await adapters.load("name", "a")
        long = Request("long", [*range(1, 14)], SamplingParams(3), adapter=old)
        await computed(runner, read(engine.submit([long])))
        running = engine.submit([request(old, max_tokens=20)])
        new = await adapters.load("name", "a")
        assert new.key != old.key
        assert store.kept == {old.key, new.key}
        await computed(runner, read(running))
        assert store.kept == {new.key}
        again = Request("again", [*range(1, 14)], SamplingParams(3), adapter=new)

        async def num_cached() -> int:
            async with engine.submit([again]) as stream:
                (first, *_) = [output async for outputs in stream for output in outputs]
                return first.num_cached_tokens

        assert await computed(runner, num_cached()) == 0


async def test_a_load_that_nobody_waits_for_any_more_leaves_nothing():
    store = Store()
    adapters = serving(store)
    store.gate.clear()
    loading = asyncio.create_task(adapters.load("name", "a"))
    await begun(store)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    store.gate.set()
    await asyncio.to_thread(store.gone.wait, 60)
    assert store.kept == set()
    assert adapters.find("name") is None


async def test_an_aborted_request_gives_its_adapter_back_once_the_step_that_needs_it_has_settled():
    store, runner = Store(), FakeRunner(manual=True)
    adapters = serving(store)
    async with engine_on(runner, adapters=adapters) as engine:
        adapter = await adapters.load("name", "a")
        async with engine.submit([request(adapter), request(adapter)]):
            await runner.launched.wait()
        unloading = asyncio.create_task(adapters.unload("name"))
        await turns(4)
        assert store.kept == {adapter.key}
        runner.events[0].complete()
        assert await unloading
        assert store.kept == set()


class RunnerFactory:
    """As start.ModelRunnerFactory has adapters go and come with the model."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    async def build(self) -> FakeRunner:
        self._adapters.awake(serving(Store()))
        return FakeRunner()

    async def release(self, level: SleepLevel) -> None:
        self._adapters.sleep()


async def test_adapters_of_an_engine_that_slept_are_read_again_when_somebody_asks():
    """One that is loaded meanwhile is seen to be good, and kept no more than the others."""
    store = Store()
    adapters = serving(store, 2, 3)
    async with engine_on(FakeRunner(), adapters=adapters, runner_factory=RunnerFactory(adapters)) as engine:
        first, second = await adapters.load("first", "a"), await adapters.load("second", "b")
        await read(engine.submit([request(first)]))
        await engine.sleep()
        assert not store.kept
        store.broken.add("bad")
        with pytest.raises(AdapterRefused, match="too wide"):
            await adapters.load("third", "bad")
        late = await adapters.load("late", "c")
        assert not store.kept
        assert [each.name for each in adapters.all()] == ["first", "second", "late"]
        for adapter in (first, late):
            assert (await read(engine.submit([request(adapter)])))[0] == ([3, 4, 5], FinishReason.LENGTH)
        assert store.kept == {first.key, late.key}
        assert second.key not in store.forgotten
