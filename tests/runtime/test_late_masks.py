"""Masks slower than the forward pass they are for, through the engine over a FakeRunner: nobody waits but their own rows."""

from __future__ import annotations

import asyncio
import threading

import pytest

from runtime.api import EngineStopped, FinishReason
from runtime.constrain.deferred import is_current
from tests.fake_runner import FakeRunner, LateMasks, Rule
from tests.invariants import check_pool, check_tables
from tests.runtime.test_engine import engine_on, read, request, value
from tests.runtime.test_mask_maker import drawn_by, from_last, until

STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR


class Gate:
    """Makes matchers whose mask behind `behind` tokens waits until the gate is opened."""

    def __init__(self, behind: int, rule=from_last) -> None:
        self.behind = behind
        self.rule = rule
        self.opened, self.reached = threading.Event(), threading.Event()
        self.matchers: list[Rule] = []

    def __call__(self) -> Rule:
        gate = self

        class Gated(Rule):
            def allowed(self):
                if len(self.ids) == gate.behind:
                    gate.reached.set()
                    assert gate.opened.wait(60)
                return super().allowed()

        self.matchers.append(Gated(self.rule))
        return self.matchers[-1]


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """Where a test keeps a gate shut, it is not for time to open it."""
    monkeypatch.setattr("runtime.constrain.mask_maker.LIMIT_S", 60.0)


def hasty() -> FakeRunner:
    """Whose forward passes take no time."""
    return FakeRunner(patient=False)


def held(engine) -> dict[str, int]:
    """Where the tokens will stand whose draws are held; on a slow machine any mask may be late for a moment."""
    snapshots, scheduler = engine.loop._masked._deferred._snapshots, engine._scheduler
    rows = [row for snapshot in snapshots for row in snapshot.batch.rows if is_current(scheduler, row)]
    return {scheduler.names[row.number]: row.end for row in rows}


def ends_sampled_late(runner: FakeRunner) -> list[int]:
    return [row.end for batch in runner.sampled_late for row in batch.rows]


@pytest.mark.parametrize("behind", [0, 4])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
async def test_neighbours_stream_on_while_a_mask_is_made_and_its_row_then_goes_on_as_it_would_have(
    steps_in_flight, behind
):
    gate = Gate(behind)
    async with engine_on(hasty(), steps_in_flight=steps_in_flight) as engine:
        slow = asyncio.create_task(read(engine.submit([request((5,) * 7, 12, matchers=(gate,))])))
        there = engine.submit([request(max_tokens=40), request(max_tokens=40, matchers=(lambda: Rule(from_last),))])
        assert await read(there) == {0: (list(range(3, 43)), LENGTH), 1: (drawn_by(from_last, 40, 3), LENGTH)}
        assert await read(engine.submit([request(max_tokens=5)])) == {0: (list(range(3, 8)), LENGTH)}
        assert gate.reached.is_set()
        assert not slow.done()
        gate.opened.set()
        assert await slow == {0: (drawn_by(from_last, 12, 7), LENGTH)}
        check_pool(engine._scheduler)
    (matcher,) = gate.matchers
    assert matcher.ids == drawn_by(from_last, 11, 7)


async def test_a_request_that_comes_while_nothing_but_a_late_mask_is_awaited_is_served_at_once():
    gate = Gate(2)
    async with engine_on(hasty()) as engine:
        slow = asyncio.create_task(read(engine.submit([request(max_tokens=6, name="slow", matchers=(gate,))])))
        await until(lambda: held(engine) == {"slow": 5} and not engine.loop.in_flight)
        assert await read(engine.submit([request()])) == {0: ([3, 4, 5, 6], LENGTH)}
        gate.opened.set()
        assert await slow == {0: (drawn_by(from_last, 6, 3), LENGTH)}


async def test_rows_that_stand_behind_a_slow_one_on_its_thread_do_not_wait_for_it():
    gate = Gate(1)
    async with engine_on(hasty(), max_num_seqs=20) as engine:
        usual = [request(max_tokens=9, matchers=(lambda: Rule(from_last),)) for _ in range(16)]
        slow = asyncio.create_task(read(engine.submit([request(max_tokens=9, matchers=(gate,))])))
        got = await read(engine.submit(usual))
        assert list(got.values()) == [(drawn_by(from_last, 9, 3), LENGTH)] * 16
        assert not slow.done()
        gate.opened.set()
        assert await slow == {0: (drawn_by(from_last, 9, 3), LENGTH)}


async def test_of_two_late_masks_the_first_that_comes_is_drawn_first():
    first, second = Gate(2), Gate(2)
    async with engine_on(hasty()) as engine:
        slow = asyncio.create_task(read(engine.submit([request(max_tokens=6, name="1", matchers=(first,))])))
        other = asyncio.create_task(read(engine.submit([request((4, 4), 6, name="2", matchers=(second,))])))
        await until(lambda: held(engine) == {"1": 5, "2": 4})
        second.opened.set()
        assert await other == {0: (drawn_by(from_last, 6, 2), LENGTH)}
        assert not slow.done()
        first.opened.set()
        assert await slow == {0: (drawn_by(from_last, 6, 3), LENGTH)}


async def test_late_masks_that_come_together_are_drawn_together():
    gate = Gate(0)  # of the first token: all are in one step for certain
    runner = hasty()
    async with engine_on(runner) as engine:
        requests = [request(max_tokens=1, name=str(n), matchers=(gate,)) for n in range(5)]
        reading = asyncio.create_task(read(engine.submit(requests)))
        await until(lambda: held(engine) == dict.fromkeys("01234", 3))
        gate.opened.set()
        engine._mask_maker._threads.shutdown()  # while nothing else happens here, all are made
        got = await reading
    assert list(got.values()) == [(drawn_by(from_last, 1, 3), LENGTH)] * 5
    assert [runner.names[row.number] for row in runner.sampled_late[-1].rows] == list("01234")


async def test_what_a_held_row_computed_is_not_computed_again():
    """The state of a recurrent layer could not take a token twice."""
    runner = hasty()
    gates = [Gate(behind) for behind in (0, 3, 3, 5)]
    async with engine_on(runner, budget=9) as engine:
        requests = [request((20 + n,) * (4 + 5 * n), 8, name=str(n), matchers=(g,)) for n, g in enumerate(gates)]
        reading = asyncio.create_task(read(engine.submit([*requests, request(max_tokens=20)])))
        await until(lambda: held(engine) == {"0": 4, "1": 12, "2": 17, "3": 24})
        for gate in gates:
            gate.opened.set()
        got = await reading
    assert [got[n] for n in range(4)] == [(drawn_by(from_last, 8, 4 + 5 * n), LENGTH) for n in range(4)]
    computed: dict[str, list[int]] = {}
    for batch in runner.batches:
        for row in batch.rows:
            computed.setdefault(runner.names[row.number], []).extend(range(row.start, row.end))
    assert [computed[str(n)] for n in range(4)] == [list(range(4 + 5 * n + 7)) for n in range(4)]


async def test_who_leaves_while_its_mask_is_late_is_never_drawn_and_its_row_is_free():
    gate = Gate(1)
    runner = hasty()
    async with engine_on(runner, max_num_seqs=1) as engine:
        leaves = engine.submit([request(max_tokens=9, name="leaves", matchers=(gate,))])
        await until(lambda: held(engine) == {"leaves": 4})
        async with leaves:
            pass
        check_pool(engine._scheduler)
        stays = asyncio.create_task(read(engine.submit([request(max_tokens=30)])))
        await until(lambda: engine._scheduler.running)
        gate.opened.set()
        assert await stays == {0: (list(range(3, 33)), LENGTH)}
        assert 4 not in ends_sampled_late(runner)
        assert value(engine, "request_success", ("finished_reason", "abort")) == 1


async def test_a_mask_that_is_late_by_too_much_ends_its_own_request(monkeypatch):
    """It is the only mask there is, so no other can be late on a machine that is slow."""
    monkeypatch.setattr("runtime.constrain.mask_maker.LIMIT_S", 0.05)
    gate = Gate(0)
    async with engine_on(hasty()) as engine:
        neighbour = asyncio.create_task(read(engine.submit([request(max_tokens=50)])))
        outputs = []
        async with engine.submit([request(max_tokens=9, matchers=(gate,))]) as stream:
            async for found in stream:
                outputs += found
        assert [id for output in outputs for id in output.token_ids] == []
        assert (outputs[-1].finish, outputs[-1].error) == (ERROR, "a mask took longer than 0.05 s")
        assert not gate.opened.is_set()
        gate.opened.set()
        assert await neighbour == {0: (list(range(3, 53)), LENGTH)}
        assert engine.health().ok
        check_pool(engine._scheduler)


@pytest.mark.parametrize("when", ["while it waits", "when it has come back"])
async def test_a_row_preempted_while_its_mask_is_late_is_drawn_once_and_right(when):
    gate = Gate(3)
    runner = hasty()
    async with engine_on(runner, num_blocks=16) as engine:
        greedy = asyncio.create_task(read(engine.submit([request(max_tokens=58, name="greedy")])))
        slow = asyncio.create_task(read(engine.submit([request((5,) * 9, 12, name="slow", matchers=(gate,))])))
        await until(lambda: held(engine) == {"slow": 12})
        await until(lambda: value(engine, "num_preemptions"))
        assert 12 not in ends_sampled_late(runner)
        check_pool(engine._scheduler)
        check_tables(engine._scheduler)
        if when == "while it waits":
            gate.opened.set()
        assert await greedy == {0: (list(range(3, 61)), LENGTH)}
        if when == "when it has come back":
            await until(lambda: held(engine) == {"slow": 12})
            gate.opened.set()
        assert await slow == {0: (drawn_by(from_last, 12, 9), LENGTH)}
        check_pool(engine._scheduler)
    if when == "when it has come back":
        assert ends_sampled_late(runner).count(12) == 1
    (matcher,) = gate.matchers
    assert matcher.ids == drawn_by(from_last, 11, 9)


async def test_a_neighbour_s_failed_step_makes_a_held_row_start_over():
    gate = Gate(2)
    runner = hasty()
    async with engine_on(runner) as engine:
        slow = asyncio.create_task(read(engine.submit([request(max_tokens=6, name="slow", matchers=(gate,))])))
        await until(lambda: held(engine) == {"slow": 5} and not engine.loop.in_flight)
        runner.manual = True
        unlucky = engine.submit([request(name="unlucky")])
        await until(lambda: len(engine.loop.in_flight) == 2)
        runner.manual = False
        failed, behind = runner.events[-2:]
        failed.complete(RuntimeError())
        behind.complete()
        assert (await read(unlucky))[0][1] is ERROR
        gate.opened.set()
        assert await slow == {0: (drawn_by(from_last, 6, 3), LENGTH)}
        check_pool(engine._scheduler)


@pytest.mark.parametrize("short_of", ["room for a copy", "room for the draw"])
async def test_a_held_row_for_which_there_is_no_memory_starts_over_or_ends_alone(short_of):
    class Short(FakeRunner):
        def _unsampled(self, sampled, batch):
            if sampled is self.sampled_late and batch.rows[0].end == 5 and short_of == "room for a copy":
                raise MemoryError
            return super()._unsampled(sampled, batch)

        def _sample(self, sampled, batch, masks):
            if sampled is self.sampled_late and batch.rows[0].end == 5:
                raise MemoryError
            return super()._sample(sampled, batch, masks)

    gate = Gate(2)
    async with engine_on(Short(patient=False)) as engine:
        neighbour = asyncio.create_task(read(engine.submit([request(max_tokens=60)])))
        slow = asyncio.create_task(read(engine.submit([request(max_tokens=6, name="slow", matchers=(gate,))])))
        if short_of == "room for the draw":
            await until(lambda: held(engine) == {"slow": 5})
            gate.opened.set()
            # Its mask is there when it has been computed again: nothing needs to be copied for it then.
            assert await slow == {0: (drawn_by(from_last, 6, 3), LENGTH)}
        else:
            assert await slow == {0: (drawn_by(from_last, 2, 3), ERROR)}
        assert await neighbour == {0: (list(range(3, 63)), LENGTH)}
        assert engine.health().ok
        check_pool(engine._scheduler)
    gate.opened.set()


async def test_a_late_mask_may_say_that_its_sequence_is_complete():
    gate = Gate(3, lambda ids: {7} if len(ids) < 3 else ())
    async with engine_on(hasty()) as engine:
        slow = asyncio.create_task(read(engine.submit([request(max_tokens=9, name="slow", matchers=(gate,))])))
        await until(lambda: held(engine) == {"slow": 6})
        gate.opened.set()
        assert await slow == {0: ([7, 7, 7], STOP)}
        check_pool(engine._scheduler)


async def test_draining_waits_for_a_late_mask_and_gives_it_up_in_the_end():
    for patience_s, aborted, finish in ((60.0, 0, LENGTH), (0.0, 1, ABORT)):
        gate = Gate(2)
        async with engine_on(hasty()) as engine:
            slow = asyncio.create_task(read(engine.submit([request(max_tokens=6, name="slow", matchers=(gate,))])))
            await until(lambda: held(engine) == {"slow": 5})
            draining = asyncio.create_task(engine.drain(patience_s))
            await until(lambda: not engine._accepting)
            with pytest.raises(EngineStopped):
                engine.submit([request()])
            if patience_s:
                gate.opened.set()
            assert await draining == aborted
            assert (await slow)[0][1] is finish
        gate.opened.set()


async def test_an_engine_closes_while_a_mask_is_late():
    gate = Gate(2)
    async with engine_on(hasty()) as engine:
        slow = asyncio.create_task(read(engine.submit([request(max_tokens=6, name="slow", matchers=(gate,))])))
        await until(lambda: held(engine) == {"slow": 5})
    assert (await slow)[0][1] is ABORT
    gate.opened.set()


@pytest.mark.parametrize("num_blocks", [16, 64])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_every_mask_may_be_late(steps_in_flight, num_blocks):
    runner = hasty()
    async with engine_on(runner, num_blocks=num_blocks, steps_in_flight=steps_in_flight) as engine:
        late = LateMasks(engine._scheduler)
        masked = [request((9, n), 40, name=str(n), matchers=(late.rule(str(n), from_last),)) for n in range(6)]
        got = await read(engine.submit([*masked, request(max_tokens=40)]))
        assert value(engine, "num_preemptions") > 0 or num_blocks == 64
        check_pool(engine._scheduler)
        check_tables(engine._scheduler)
    assert sum(len(batch.rows) for batch in runner.sampled_late) > 100
    assert [got[n] for n in range(6)] == [(drawn_by(from_last, 40, 2), LENGTH)] * 6
    assert got[6] == (list(range(3, 43)), LENGTH)
