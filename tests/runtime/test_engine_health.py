"""Truthful health: the engine over a FakeRunner, with a hand on the clock. What hangs, fails or is lost shows at once; what does
not, does not; and whatever happens, the engine ends when it is asked to."""

from __future__ import annotations

import asyncio

import pytest

from runtime.api import EngineStopped, FinishReason, ProbeFailed
from runtime.batch import NOT_FINITE
from runtime.fault import Fault, RowFailed, WorkerGone
from runtime.metrics.engine_meter import EngineMeter
from runtime.metrics.step_health import HealthLimits, StepHealth
from runtime.policy.step_budget import FixedBudget
from runtime.profiling.session import Profiling
from runtime.speculate.speculation import Speculation
from tests.fake_runner import FakeRunner, make_engine
from tests.invariants import check_pool, check_tables
from tests.runtime.test_engine import CountsUp, engine_on, read, request, turns, value

LIMITS = HealthLimits(factor=10, min_s=5, min_unseen_s=30, first_s=120, hopeless_s=200, num_failures=3)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Failing(FakeRunner):
    """Its launches raise what `errors` hold, in order; then they are FakeRunner's."""

    def __init__(self, *errors: Exception, **options) -> None:
        super().__init__(**options)
        self.errors = list(errors)

    def launch(self, batch):
        if self.errors:
            raise self.errors.pop(0)
        return super().launch(batch)


async def complete_next(runner: FakeRunner, error: Exception | None = None) -> None:
    """The oldest step that runs ends, and the engine takes it in."""
    while not (left := [event for event in runner.events if not event.is_done()]):
        await turns(1)
    left[0].complete(error)
    await turns(8)


# --- steps that take too long ------------------------------------------------------------------------------------


async def test_a_step_that_takes_far_longer_than_its_kind_did_is_told_within_seconds():
    clock = Clock()
    runner = FakeRunner(manual=True, clock=clock)
    async with engine_on(runner, steps_in_flight=1, clock=clock, health_limits=LIMITS) as engine:
        stream = engine.submit([request(max_tokens=40)])
        for _ in range(4):
            await turns(8)
            clock.now += 0.02
            await complete_next(runner)
        clock.now += 4.9
        assert engine.health().ok
        clock.now += 0.2
        health = engine.health()
        assert not health.ok
        assert not health.hopeless
        assert health.reason == "a step has been running for 5 s, where 5 s would be much"
        clock.now += 200
        assert engine.health().hopeless
        await complete_next(runner)
        assert engine.health().ok, "it was slow and no more"
        async with stream:
            pass


async def test_what_is_slow_by_nature_may_take_its_time():
    clock = Clock()
    runner = FakeRunner(manual=True, clock=clock)
    async with engine_on(runner, steps_in_flight=1, clock=clock, health_limits=LIMITS) as engine:
        stream = engine.submit([request(max_tokens=40)])
        for _ in range(4):
            await turns(8)
            clock.now += 3
            await complete_next(runner)
        clock.now += 29
        assert engine.health().ok
        clock.now += 2
        assert not engine.health().ok
        async with stream:
            pass


async def test_the_first_step_of_all_has_no_history_to_be_measured_by():
    clock = Clock()
    runner = FakeRunner(manual=True, clock=clock)
    async with engine_on(runner, clock=clock, health_limits=LIMITS) as engine:
        stream = engine.submit([request()])
        await turns(5)
        clock.now += 119
        assert engine.health().ok
        clock.now += 2
        assert not engine.health().ok
        async with stream:
            pass


def batch_of(num_tokens: int, context: int, **row):
    from runtime.batch import ScheduledBatch, ScheduledRow

    return ScheduledBatch((ScheduledRow(1, 0, context - num_tokens, num_tokens, (), **row),), num_tokens, 0)


def test_a_kind_never_seen_may_take_what_those_that_were_seen_allow():
    health = StepHealth(LIMITS)
    health.settled(batch_of(1, 100), 0.01)
    assert health.limit_s(batch_of(1, 100)) == 5
    assert health.limit_s(batch_of(512, 512)) == 10 * 0.01 * 2**9 * 2**3
    health.settled(batch_of(512, 512), 2.0)
    assert health.limit_s(batch_of(512, 512)) == 20
    assert health.limit_s(batch_of(512, 100_000)) == 10 * 2.0 * 2**7  # a prefix of many tokens came out of the cache
    assert health.limit_s(batch_of(1, 100)) == 5, "decodes are measured by decodes"


def test_history_follows_a_machine_that_becomes_faster_and_one_that_becomes_slower():
    health = StepHealth(LIMITS)
    health.settled(batch_of(1, 100), 20.0)
    assert health.limit_s(batch_of(1, 100)) == 200
    for _ in range(100):
        health.settled(batch_of(1, 100), 0.01)
    assert health.limit_s(batch_of(1, 100)) == 5
    health.settled(batch_of(1, 100), 2.0)
    assert health.limit_s(batch_of(1, 100)) == 20


# --- failures in a row -------------------------------------------------------------------------------------------


async def test_launches_that_keep_failing_show_and_one_that_goes_ends_it():
    clock = Clock()
    runner = Failing(*[RuntimeError("no")] * 4)
    async with engine_on(runner, clock=clock, health_limits=LIMITS) as engine:
        for num in range(4):
            assert engine.health().ok == (num < 3)
            assert await read(engine.submit([request()])) == {0: ([], FinishReason.ERROR)}
        health = engine.health()
        assert health.failing
        assert not health.hopeless
        assert health.reason == "the last 4 steps failed"
        await engine.probe()
        assert engine.health().ok


async def test_steps_that_fail_on_the_device_count_as_well_and_for_long_without_hope():
    clock = Clock()
    runner = FakeRunner(manual=True, clock=clock)
    async with engine_on(runner, steps_in_flight=1, clock=clock, health_limits=LIMITS) as engine:
        for _ in range(3):
            stream = engine.submit([request()])
            await complete_next(runner, RuntimeError("no"))
            assert await read(stream) == {0: ([], FinishReason.ERROR)}
            clock.now += 150
        health = engine.health()
        assert (health.ok, health.failing, health.hopeless) == (False, True, True)
        check_pool(engine._scheduler)


async def test_what_one_request_asks_for_and_cannot_have_is_no_sign_of_illness_and_costs_nobody_else():
    class Unbindable(FakeRunner):
        def launch(self, batch):
            for row in batch.rows:
                if row.binding is not None and row.binding.prompt_ids[0] == 666:
                    raise RowFailed(row.number)
            return super().launch(batch)

    async with engine_on(Unbindable()) as engine:
        streams = [engine.submit([request((first, 2, 3))]) for first in (1, 666, 2, 666, 666, 666, 3)]
        results = [await read(stream) for stream in streams]
        good = {0: ([3, 4, 5, 6], FinishReason.LENGTH)}
        bad = {0: ([], FinishReason.ERROR)}
        assert results == [good, bad, good, bad, bad, bad, good]
        assert engine.health().ok


# --- memory -------------------------------------------------------------------------------------------------------


async def test_a_step_without_memory_for_once_costs_nobody_anything():
    runner = Failing(MemoryError("for once"))
    async with engine_on(runner) as engine:
        got = await read(engine.submit([request(), request((1, 2, 3, 4, 5), 2)]))
        assert got == {0: ([3, 4, 5, 6], FinishReason.LENGTH), 1: ([5, 6], FinishReason.LENGTH)}
        assert engine.health().ok


@pytest.mark.parametrize("where", ["launch", "device"])
async def test_what_is_too_large_for_the_memory_ends_and_the_others_go_on(where):
    class Small(FakeRunner):
        """No memory for rows of more than 8 tokens."""

        def launch(self, batch):
            if max(row.num_tokens for row in batch.rows) <= 8:
                return super().launch(batch)
            if where == "launch":
                raise MemoryError
            self.manual = True
            step = super().launch(batch)
            self.manual = False
            self.events[-1].complete(MemoryError())
            return step

    async with engine_on(Small()) as engine:
        streams = [engine.submit([request([length] * length)]) for length in (3, 20, 4, 12)]
        results = [(await read(stream))[0] for stream in streams]
        assert results[0] == ([3, 4, 5, 6], FinishReason.LENGTH)
        assert results[1] == ([], FinishReason.ERROR)
        assert results[2] == ([4, 5, 6, 7], FinishReason.LENGTH)
        assert results[3] == ([], FinishReason.ERROR)
        check_pool(engine._scheduler)
        check_tables(engine._scheduler)
        assert engine._scheduler.blocks.pool.num_free == 64


# --- the device is lost -------------------------------------------------------------------------------------------


class Poisoned(FakeRunner):
    def fault(self, error):
        return Fault.LOST if "illegal" in str(error) else super().fault(error)


@pytest.mark.parametrize("where", ["launch", "device", "worker"])
async def test_an_engine_whose_device_is_lost_dies_says_why_and_tells_everybody(where):
    if where == "device":
        runner = Poisoned(manual=True)
    else:
        error = WorkerGone("it has ended") if where == "worker" else RuntimeError("an illegal memory access")
        runner = type("Lost", (Failing, Poisoned), {})(error)
    async with engine_on(runner) as engine:
        death = asyncio.ensure_future(engine.death())
        streams = [engine.submit([request()]), engine.submit([request(), request()])]
        if where == "device":
            await turns(5)
            assert not death.done()
            runner.events[0].complete(RuntimeError("an illegal memory access"))
        why = await death
        for stream, num in zip(streams, (1, 2), strict=True):
            assert await read(stream) == {index: ([], FinishReason.ERROR) for index in range(num)}
        health = engine.health()
        assert (health.ok, health.hopeless, health.reason) == (False, True, why)
        with pytest.raises(EngineStopped, match="cannot compute any more"):
            engine.submit([request()])
        with pytest.raises(EngineStopped):
            await engine.probe()
        assert await engine.drain(3600) == 0, "nothing runs, so there is nothing to wait for"


async def test_a_bug_in_the_loop_is_a_death_too():
    async with engine_on(FakeRunner()) as engine:
        engine._scheduler.settle = lambda *_: 1 / 0
        assert await read(engine.submit([request()])) == {0: ([], FinishReason.ERROR)}
        assert await engine.death() == "the engine died: ZeroDivisionError"
        assert await engine.drain(3600) == 0


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (EngineMeter, "launched"),
        (EngineMeter, "settled"),
        (EngineMeter, "gained"),
        (EngineMeter, "finished"),
        (EngineMeter, "delivered"),
        (EngineMeter, "report"),
        (StepHealth, "settled"),
        (FixedBudget, "settled"),
        (Speculation, "record_step"),
        (Profiling, "settled"),
    ],
)
async def test_an_error_in_code_that_only_counts_or_learns_is_logged_once_and_ends_no_request(
    owner, name, monkeypatch, caplog
):
    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(owner, name, fail)
    async with engine_on(FakeRunner(), speculation=Speculation(CountsUp(), 3)) as engine:
        for _ in range(2):
            assert await read(engine.submit([request()])) == {0: ([3, 4, 5, 6], FinishReason.LENGTH)}
        assert engine.health().ok
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


async def test_an_error_in_a_hook_of_finished_requests_ends_no_request_and_keeps_no_other_hook_from_its_call():
    finished = []
    async with engine_on(FakeRunner()) as engine:
        engine.when_finished(lambda _: 1 / 0)
        engine.when_finished(finished.append)
        assert await read(engine.submit([request(name="it")])) == {0: ([3, 4, 5, 6], FinishReason.LENGTH)}
        assert engine.health().ok
    assert [each.request.id for each in finished] == ["it"]


# --- the end ------------------------------------------------------------------------------------------------------


async def test_closing_waits_for_a_step_that_hangs_no_longer_than_it_is_told_to():
    runner = FakeRunner(manual=True)
    engine = make_engine(runner)
    stream = engine.submit([request()])
    await turns(5)
    assert not await engine.close(limit_s=0)
    assert runner.closed
    assert (await read(stream))[0][1] is FinishReason.ABORT


async def test_closing_says_whether_all_has_ended():
    engine = make_engine(FakeRunner())
    await read(engine.submit([request()]))
    assert await engine.close()


# --- probes -------------------------------------------------------------------------------------------------------


async def test_a_probe_of_an_idle_engine_computes_one_token_and_is_in_no_statistics():
    runner = FakeRunner()
    async with engine_on(runner) as engine:
        await engine.probe()
        (batch,) = runner.batches
        (row,) = batch.rows
        assert (row.num_tokens, row.samples) == (1, True)
        for name in ("generation_tokens", "prompt_tokens", "prefix_cache_queries"):
            assert value(engine, name) == 0
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
            assert sum(value(engine, name).counts) == 0, name
        assert not any(value(engine, "request_success", ("finished_reason", reason.value)) for reason in FinishReason)
        assert engine._scheduler.blocks.pool.num_free == 64


async def test_a_probe_of_a_busy_engine_costs_no_step():
    runner = FakeRunner(manual=True)
    async with engine_on(runner, max_num_seqs=1, steps_in_flight=1) as engine:
        stream = engine.submit([request()])
        await turns(5)
        probing = asyncio.ensure_future(engine.probe())
        await turns(5)
        assert not probing.done()
        await complete_next(runner)
        await probing
        assert {row.number for batch in runner.batches for row in batch.rows} == {1}
        async with stream:
            pass


async def test_a_probe_whose_busy_engine_has_nothing_to_do_any_more_computes_its_own_token():
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        stream = engine.submit([request(max_tokens=1)])
        await turns(5)
        probing = asyncio.ensure_future(engine.probe())
        await turns(5)
        await complete_next(runner, RuntimeError("its only step fails"))
        assert await read(stream) == {0: ([], FinishReason.ERROR)}
        assert not probing.done()
        await complete_next(runner)
        await probing
        assert len(runner.batches) == 2


async def test_a_probe_is_not_deceived_by_numbers_that_are_none():
    async with engine_on(FakeRunner(lambda row: NOT_FINITE)) as engine:
        with pytest.raises(ProbeFailed):
            await engine.probe()


async def test_a_probe_that_fails_says_so_and_one_that_waits_is_told_of_the_death():
    runner = type("Lost", (Failing, Poisoned), {})(RuntimeError("no"), manual=True)
    async with engine_on(runner) as engine:
        with pytest.raises(ProbeFailed):
            await engine.probe()
        stream = engine.submit([request()])
        await turns(5)
        probing = asyncio.ensure_future(engine.probe())
        await turns(5)
        runner.events[0].complete(RuntimeError("an illegal memory access"))
        with pytest.raises(EngineStopped):
            await probing
        async with stream:
            pass


async def test_a_probe_that_is_given_up_leaves_nothing_behind():
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        probing = asyncio.ensure_future(engine.probe())
        await turns(5)
        probing.cancel()
        await asyncio.wait({probing})
        assert engine.health().num_running == 0
        await complete_next(runner)
        assert engine._scheduler.blocks.pool.num_free == 64
