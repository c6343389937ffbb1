"""Requests end when their time is over, waiting or running, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib

from runtime.api import FinishReason, Request, SamplingParams
from runtime.engine.admission import AdmissionLimits
from tests.fake_runner import FakeRunner, make_engine
from tests.invariants import check_pool


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def engine_on(runner: FakeRunner, clock: Clock, **options):
    engine = make_engine(runner, clock=clock, **options)
    try:
        yield engine
    finally:
        runner.manual = False
        for event in runner.events:
            if not event.is_done():
                event.complete()
        await engine.close()


def request(deadline_s: float | None = None, **params) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(50, ignore_eos=True, **params), arrival_s=0.0, deadline_s=deadline_s)


async def outputs_of(stream) -> list:
    async with stream:
        return [output async for outputs in stream for output in outputs]


async def turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_a_running_request_ends_at_its_deadline_and_its_neighbour_goes_on():
    runner, clock = FakeRunner(manual=True), Clock()
    async with engine_on(runner, clock) as engine:
        late, other = engine.submit([request(1005.0)]), engine.submit([request()])
        await turns(5)
        clock.now = 1004.9
        runner.events[0].complete()
        await turns(5)
        assert len(engine._scheduler.running) == 2
        clock.now = 1005.0
        runner.events[1].complete()
        found = await outputs_of(late)
        assert [(output.finish, output.retry_after_s) for output in found][-1] == (FinishReason.TIMEOUT, None)
        assert sum(len(output.token_ids) for output in found) in (1, 2)  # what it had is its reader's
        runner.manual = False
        for event in runner.events:
            if not event.is_done():
                event.complete()
        assert sum(len(output.token_ids) for output in await outputs_of(other)) == 50
        check_pool(engine._scheduler)
        assert engine._scheduler.blocks.pool.num_free == engine._scheduler.blocks.pool.num_blocks


async def test_who_waits_too_long_to_start_ends_and_is_told_when_to_come_again():
    runner, clock = FakeRunner(manual=True), Clock()
    async with engine_on(runner, clock, max_num_seqs=1, admission=AdmissionLimits(max_queue_time_s=7.0)) as engine:
        running, waiting = engine.submit([request()]), engine.submit([request()])
        await turns(5)
        clock.now += 7.0
        runner.events[0].complete()
        (last,) = await outputs_of(waiting)
        assert (last.finish, last.token_ids) == (FinishReason.TIMEOUT, [])
        assert last.retry_after_s >= 1.0
        assert len(engine._scheduler.running) == 1  # started in time, so it has all the time it wants
        async with running:
            pass
        metric = next(metric for metric in engine.metrics() if metric.name == "request_success")
        assert metric.samples[(("finished_reason", "timeout"),)] == 1


async def test_a_deadline_is_kept_though_a_step_never_ends():
    """The alarm, with no step to wake the engine: a deadline that is over already rings at once."""
    runner = FakeRunner(manual=True)
    async with engine_on(runner, Clock()) as engine:
        running = engine.submit([request()])
        await turns(5)
        stuck = engine.submit([request(999.0)])
        (last,) = await outputs_of(stuck)
        assert last.finish is FinishReason.TIMEOUT
        async with running:
            pass


async def test_an_idle_engine_has_no_timer_for_deadlines():
    runner = FakeRunner()
    async with engine_on(runner, Clock()) as engine:
        await outputs_of(engine.submit([request(5000.0)]))
        await turns(5)
        assert not [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]


async def test_what_continues_is_not_in_the_queue_anew():
    runner, clock = FakeRunner(manual=True), Clock()
    async with engine_on(runner, clock, max_num_seqs=1, admission=AdmissionLimits(max_queue_time_s=7.0)) as engine:
        running = engine.submit([request()])
        await turns(5)
        beam = engine.submit([request()], continues=True)
        clock.now += 100
        runner.events[0].complete()
        await turns(5)
        assert len(engine._scheduler.waiting) == 1
        for stream in (running, beam):
            async with stream:
                pass


async def test_deadlines_of_requests_that_have_ended_are_not_kept():
    async with engine_on(FakeRunner(manual=True), Clock()) as engine, engine.submit([request()]):  # which is never idle
        for number in range(1_000):
            async with engine.submit([request(50_000.0 - number)]):
                pass
        assert 0 < len(engine._deadlines._heap) <= 66
