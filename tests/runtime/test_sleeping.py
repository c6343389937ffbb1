"""An engine that sleeps: when it does, what it gives back, what wakes it, and what becomes of requests meanwhile."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest

from runtime.api import FinishReason, SleepError, SleepLevel
from tests.fake_runner import FakeRunner, make_engine
from tests.invariants import check_pool
from tests.runtime.test_engine import engine_on, read, request, turns, value

AWAKE, HOST, DROPPED = SleepLevel


class FakeRunnerFactory:
    """Builds FakeRunners, when `may_build` is set."""

    def __init__(self) -> None:
        self.runners: list[FakeRunner] = []
        self.released: list[SleepLevel] = []
        self.may_build = asyncio.Event()
        self.may_build.set()
        self.error: Exception | None = None

    async def build(self):
        await self.may_build.wait()
        if self.error is not None:
            raise self.error
        self.runners.append(FakeRunner())
        return self.runners[-1]

    async def release(self, level):
        self.released.append(level)


class Timer:
    """A hand on the clock: the one alarm that there is, and when it is due."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.due_s: float | None = None
        self._call: Callable[[], None] | None = None

    def clock(self) -> float:
        return self.now

    def call_later(self, delay_s, call):
        self.due_s, self._call = self.now + delay_s, call
        return self

    def cancel(self):
        self.due_s = self._call = None

    def go_to(self, now):
        self.now = now
        if self.due_s is not None and self.due_s <= now:
            call, self._call, self.due_s = self._call, None, None
            call()

    async def until_set(self):
        await until(lambda: self.due_s is not None)


def level(engine) -> SleepLevel:
    return engine.health().sleep_level


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not become true")


@pytest.mark.parametrize("asked", [HOST, DROPPED])
async def test_it_gives_its_runner_and_its_cached_prefixes_away_and_gets_another_for_a_request(asked):
    runner, runner_factory = FakeRunner(), FakeRunnerFactory()
    async with engine_on(runner, runner_factory=runner_factory) as engine:
        before = await read(engine.submit([request(range(2, 14))]))
        assert len(engine._scheduler.blocks.cache)
        await engine.sleep(asked)
        assert (level(engine), runner_factory.released) == (asked, [asked])
        assert runner.closed
        assert not len(engine._scheduler.blocks.cache)
        assert await read(engine.submit([request(range(2, 14))])) == before
        assert level(engine) is AWAKE
        assert len(runner_factory.runners) == 1
        check_pool(engine._scheduler)


async def test_nothing_refers_to_the_runner_any_more():
    engine = make_engine(FakeRunner(), runner_factory=FakeRunnerFactory())
    gone = weakref.ref(engine.loop.runner)
    await read(engine.submit([request()]))
    await engine.sleep()
    gc.collect()
    assert gone() is None
    await engine.close()


async def test_it_sleeps_when_nobody_has_come_for_long_and_an_alarm_says_when_to_look():
    timer, runner_factory = Timer(), FakeRunnerFactory()
    options = {
        "runner_factory": runner_factory,
        "sleep_after_s": 60.0,
        "clock": timer.clock,
        "call_later": timer.call_later,
    }
    async with engine_on(FakeRunner(), **options) as engine:
        await timer.until_set()
        assert timer.due_s == 1060.0
        timer.now = 1050.0
        await read(engine.submit([request()]))
        await timer.until_set()
        assert timer.due_s == 1110.0
        timer.go_to(1109.0)
        await turns(5)
        assert level(engine) is AWAKE
        timer.go_to(1110.0)
        await until(lambda: level(engine) is HOST)
        await turns(5)
        assert timer.due_s is None  # who sleeps has no alarm
        await read(engine.submit([request()]))
        await timer.until_set()
        assert (level(engine), timer.due_s) == (AWAKE, 1170.0)


async def test_probes_do_not_keep_it_awake():
    timer, runner_factory = Timer(), FakeRunnerFactory()
    options = {
        "runner_factory": runner_factory,
        "sleep_after_s": 60.0,
        "clock": timer.clock,
        "call_later": timer.call_later,
    }
    async with engine_on(FakeRunner(), **options) as engine:
        await timer.until_set()
        timer.now = 1030.0
        await engine.probe()
        await timer.until_set()
        assert timer.due_s == 1060.0


async def test_requests_that_come_while_it_wakes_wait_in_the_queue():
    runner_factory = FakeRunnerFactory()
    async with engine_on(FakeRunner(), runner_factory=runner_factory) as engine:
        await engine.sleep()
        runner_factory.may_build.clear()
        answers = [asyncio.create_task(read(engine.submit([request(name=f"r{number}")]))) for number in range(3)]
        await turns(5)
        assert engine.health().num_waiting == 3
        assert engine.health().ok
        runner_factory.may_build.set()
        for answer in answers:
            assert (await answer)[0] == ([3, 4, 5, 6], FinishReason.LENGTH)
        assert len(runner_factory.runners) == 1


async def test_who_leaves_while_it_wakes_costs_nobody_anything():
    runner_factory = FakeRunnerFactory()
    async with engine_on(FakeRunner(), runner_factory=runner_factory) as engine:
        await engine.sleep()
        runner_factory.may_build.clear()
        async with engine.submit([request()]):
            await turns(5)
        runner_factory.may_build.set()
        assert (await read(engine.submit([request()])))[0][1] is FinishReason.LENGTH
        check_pool(engine._scheduler)


async def test_what_cannot_be_loaded_again_ends_who_waits_and_the_next_one_tries_again():
    runner_factory = FakeRunnerFactory()
    async with engine_on(FakeRunner(), runner_factory=runner_factory) as engine:
        await engine.sleep()
        runner_factory.error = OSError("no such file")
        assert (await read(engine.submit([request()])))[0][1] is FinishReason.ERROR
        with pytest.raises(SleepError, match="no such file"):
            await engine.wake_up()
        assert level(engine) is HOST
        runner_factory.error = None
        assert (await read(engine.submit([request()])))[0][1] is FinishReason.LENGTH


async def test_it_sleeps_once_nothing_is_left_to_do():
    runner, runner_factory = FakeRunner(manual=True), FakeRunnerFactory()
    async with engine_on(runner, runner_factory=runner_factory, steps_in_flight=1) as engine:
        answer = asyncio.create_task(read(engine.submit([request(max_tokens=1)])))
        await runner.launched.wait()
        asleep = asyncio.create_task(engine.sleep())
        await turns(5)
        assert level(engine) is AWAKE
        runner.events[0].complete()
        assert (await answer)[0][1] is FinishReason.LENGTH
        await asleep
        assert level(engine) is HOST


async def test_it_wakes_because_somebody_says_so_and_sleeps_deeper():
    runner_factory = FakeRunnerFactory()
    async with engine_on(FakeRunner(), runner_factory=runner_factory) as engine:
        await engine.wake_up()  # it is awake
        await engine.sleep(HOST)
        await engine.sleep(DROPPED)
        await engine.sleep(HOST)  # which it is more than
        assert (level(engine), runner_factory.released) == (DROPPED, [HOST, DROPPED])
        await engine.wake_up()
        assert (level(engine), len(runner_factory.runners)) == (AWAKE, 1)


async def test_who_says_last_is_heard():
    runner, runner_factory = FakeRunner(manual=True), FakeRunnerFactory()
    async with engine_on(runner, runner_factory=runner_factory, steps_in_flight=1) as engine:
        answer = asyncio.create_task(read(engine.submit([request(max_tokens=1)])))
        await runner.launched.wait()
        asleep = asyncio.create_task(engine.sleep())
        await turns(2)
        await engine.wake_up()
        await asleep
        runner.events[0].complete()
        await answer
        await turns(5)
        assert (level(engine), runner_factory.released) == (AWAKE, [])


async def test_metrics_tell_it():
    async with engine_on(FakeRunner(), runner_factory=FakeRunnerFactory()) as engine:

        def state() -> list[str]:
            states = ("awake", "weights_offloaded", "discard_all")
            return [each for each in states if value(engine, "engine_sleep_state", ("sleep_state", each))]

        assert state() == ["awake"]
        await engine.sleep(HOST)
        assert state() == ["weights_offloaded"]
        await engine.sleep(DROPPED)
        assert state() == ["discard_all"]


async def test_an_engine_without_a_bed_does_not_sleep():
    async with engine_on(FakeRunner(), sleep_after_s=0.001) as engine:
        with pytest.raises(SleepError, match="cannot sleep"):
            await engine.sleep()


async def test_who_waits_for_it_to_sleep_is_told_that_it_ends():
    runner, runner_factory = FakeRunner(manual=True), FakeRunnerFactory()
    async with engine_on(runner, runner_factory=runner_factory, steps_in_flight=1) as engine:
        stream = engine.submit([request()])
        await runner.launched.wait()
        asleep = asyncio.create_task(engine.sleep())
        await turns(3)
        runner.events[0].complete()
        closing = asyncio.create_task(engine.close())
        await turns(3)
        runner.events[-1].complete()  # or closing gives the step under way all of its time
        with pytest.raises(SleepError, match="shutting down"):
            await asleep
        await closing
        async with stream:
            pass
