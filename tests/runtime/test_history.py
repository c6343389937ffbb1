"""What an engine remembers for whoever looks: its last steps, the lives of its last requests, and a map of its KV blocks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from runtime.api import FinishReason
from runtime.kv.block_pool import BlockPool
from runtime.metrics import history
from tests.fake_runner import FakeRunner
from tests.runtime.test_engine import engine_on, read, request
from tests.runtime.test_late_masks import Gate, hasty


async def test_a_step_is_its_chunks_and_its_decodes():
    async with engine_on(FakeRunner(), max_num_seqs=3, budget=8) as engine:
        await read(engine.submit([request(range(20), 3)]))
        activity = engine.activity()
    steps = activity.steps
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert [(step.num_prompt_tokens, step.num_decodes) for step in steps][:5] == [
        (8, 0),
        (8, 0),
        (4, 0),
        (0, 1),
        (0, 1),
    ]
    assert all(step.launched_s <= step.settled_s for step in steps)
    assert activity.num_steps == len(steps)


async def test_the_life_of_a_request_has_its_chunks_and_its_end():
    async with engine_on(FakeRunner(), max_num_seqs=3, budget=8) as engine:
        await read(engine.submit([request(range(20), 3, name="long"), request(range(20), 3, name="twin")]))
        one, other = engine.activity().requests
    assert {one.id, other.id} == {"long", "twin"}
    assert one.finish is FinishReason.LENGTH
    assert (one.num_prompt_tokens, one.num_output_tokens) == (20, 3)
    assert [one.number, other.number] == [1, 2]
    times = (one.arrival_s, one.first_scheduled_s, one.first_token_s, one.last_token_s, one.finished_s)
    assert list(times) == sorted(times)
    computed = [event.num_tokens for event in one.events]
    assert sum(computed) + one.num_cached_tokens == 20
    assert {event.kind for event in one.events} == {"chunk"}


async def test_only_what_is_new_is_told_and_who_runs_is_told_as_such():
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        reading = asyncio.create_task(read(engine.submit([request(name="first")])))
        await runner.launched.wait()
        (live,) = engine.activity().live
        assert (live.id, live.number, live.finished_s, live.finish) == ("first", 0, None, None)
        assert live.first_scheduled_s is not None
        runner.manual = False
        for event in runner.events:
            event.complete()
        await reading
        before = engine.activity()
        assert before.live == []
        await read(engine.submit([request(name="second")]))
        after = engine.activity(after_step=before.num_steps, after_request=before.num_requests)
    assert [record.id for record in after.requests] == ["second"]
    assert [step.number for step in after.steps] == list(range(before.num_steps + 1, after.num_steps + 1))


async def test_who_reads_slowly_is_told_of_until_it_has_all_of_it():
    async with engine_on(FakeRunner()) as engine:
        async with engine.submit([request(max_tokens=3, name="slow")]) as stream:
            found = 0
            while found < 3:
                (output,) = await anext(stream)
                found += len(output.token_ids)
            activity = engine.activity()
            (live,) = activity.live
            assert (live.id, live.finish, live.delivered_s) == ("slow", FinishReason.LENGTH, None)
            assert (activity.requests, live.finished_s is None) == ([], False)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            (record,) = engine.activity().requests
            assert (record.number, engine.activity().live) == (1, [])
            assert record.delivered_s >= record.finished_s
            assert 0 <= record.held_s <= record.delivered_s - record.first_token_s
        async with engine.submit([request(max_tokens=3, name="gone")]) as stream:
            await anext(stream)
        assert [each.id for each in engine.activity(after_request=1).requests] == ["gone"], "who leaves has had enough"


async def test_preemptions_are_part_of_a_life():
    async with engine_on(FakeRunner(), num_blocks=8, budget=32) as engine:
        await read(engine.submit([request((n, 2, 3, 4, 5), 12, name=str(n)) for n in range(3)]))
        activity = engine.activity()
    preempted = [event for record in activity.requests for event in record.events if event.kind == "preempted"]
    resumed = [event for record in activity.requests for event in record.events if event.kind == "resumed"]
    assert len(preempted) == sum(step.num_preempted for step in activity.steps) > 0
    assert len(resumed) == len(preempted)


async def test_a_late_mask_is_part_of_a_life():
    gate = Gate(0)
    async with engine_on(hasty()) as engine:
        slow = asyncio.create_task(read(engine.submit([request(max_tokens=2, name="masked", matchers=(gate,))])))
        await read(engine.submit([request(max_tokens=20)]))
        assert gate.reached.is_set()
        gate.opened.set()
        await slow
        (record,) = [record for record in engine.activity().requests if record.id == "masked"]
    assert "deferred" in {event.kind for event in record.events}


async def test_it_is_bounded(monkeypatch):
    monkeypatch.setattr(history, "MAX_EVENTS", 3)
    async with engine_on(FakeRunner(), max_num_seqs=2, budget=4) as engine:
        engine._meter._history._steps = type(engine._meter._history._steps)(maxlen=5)
        engine._meter._history._requests = type(engine._meter._history._requests)(maxlen=2)
        for number in range(4):
            await read(engine.submit([request(range(number, number + 30), 2, name=str(number))]))
        activity = engine.activity()
    assert [step.number for step in activity.steps] == list(range(activity.num_steps - 4, activity.num_steps + 1))
    assert [record.id for record in activity.requests] == ["2", "3"]
    assert {len(record.events) for record in activity.requests} == {3}


@pytest.mark.parametrize("per_cell", [1, 3, 10, 16])
def test_a_map_tells_of_each_block_what_it_is(per_cell):
    class Cached:
        def has(self, block_id: int) -> bool:
            return block_id in (0, 1)

    pool = BlockPool(10)
    ids = list(pool.allocate(6))
    pool.share(ids[2:4])
    pool.release(ids[:2] + ids[5:], Cached())
    kinds = np.zeros((10, 3))
    kinds[ids[4], 0] = 1
    kinds[ids[2:4], 1] = 1
    kinds[[each for each in (0, 1) if pool.count(each) == 0], 2] = 1
    cells = np.frombuffer(pool.states(per_cell), np.uint8).reshape(-1, 3)
    expected = [np.ceil(kinds[at : at + per_cell].mean(axis=0) * 255) for at in range(0, 10, per_cell)]
    np.testing.assert_array_equal(cells, expected)
