"""The engine loop over a FakeRunner: who gets which tokens when, and what is freed when somebody leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from dataclasses import dataclass, replace

import pytest

from runtime.api import (
    ContextTooLong,
    EngineStopped,
    FinishReason,
    PoolingParams,
    QueueFull,
    Request,
    SamplingParams,
)
from runtime.batch import NOT_FINITE, ScheduledBatch
from runtime.engine.admission import AdmissionLimits
from runtime.engine.token_stream import EngineTokenStream
from runtime.policy.step_budget import FixedBudget
from runtime.speculate.scheduling import DraftScheduling
from runtime.speculate.speculation import Speculation
from tests.fake_runner import FakeRunner, make_engine
from tests.features import feature_of
from tests.invariants import check_pool, check_tables
from tests.pooling import LAST, POOLING


@contextlib.asynccontextmanager
async def engine_on(runner: FakeRunner, **options):
    engine = make_engine(runner, **options)
    try:
        yield engine
    finally:
        runner.manual = False
        for event in runner.events:
            if not event.is_done():
                event.complete()
        await engine.close()


def request(prompt=(1, 2, 3), max_tokens=4, name="r", **params) -> Request:
    return Request(name, list(prompt), SamplingParams(max_tokens, **params))


async def read(stream) -> dict[int, tuple[list[int], FinishReason | None]]:
    ids: dict[int, list[int]] = {}
    finish: dict[int, FinishReason | None] = {}
    async with stream:
        async for outputs in stream:
            for output in outputs:
                ids.setdefault(output.index, []).extend(output.token_ids)
                assert finish.get(output.index) is None
                finish[output.index] = output.finish
    return {index: (ids[index], finish[index]) for index in ids}


def value(engine, name: str, *label: tuple[str, str]):
    (metric,) = (metric for metric in engine.metrics() if metric.name == name)
    return metric.samples[tuple(label)]


async def turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_requests_of_one_submit_arrive_by_index_and_end_once(steps_in_flight):
    async with engine_on(FakeRunner(), steps_in_flight=steps_in_flight) as engine:
        got = await read(engine.submit([request(), request((1, 2, 3, 4, 5), 2), request((9,), 1)]))
    assert got == {
        0: ([3, 4, 5, 6], FinishReason.LENGTH),
        1: ([5, 6], FinishReason.LENGTH),
        2: ([1], FinishReason.LENGTH),
    }


async def test_the_next_step_is_launched_before_the_last_one_has_settled():
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        stream = engine.submit([request(max_tokens=9)])
        await turns(5)
        assert len(runner.batches) == 2
        (ahead,) = runner.batches[1].rows
        assert ahead.num_tokens == 1
        assert ahead.token_ids == ()  # its input is still on the device
        async with stream:
            pass


@dataclass(frozen=True, slots=True)
class DecidedWhen(FixedBudget):
    """A budget by which the next step is decided so long after one has begun."""

    after_s: float = 0.0

    def decide_after_s(self, batch: ScheduledBatch) -> float:
        return self.after_s


@pytest.mark.parametrize(("after_s", "waited_for"), [(0.0, 2), (3600.0, 1)])
async def test_who_comes_while_a_long_step_is_computed_waits_for_that_one_alone(after_s, waited_for):
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        engine._scheduler.step_policy.budget = DecidedWhen(None, after_s=after_s)
        stays = engine.submit([request(max_tokens=9)])
        await turns(8)
        assert len(runner.batches) == waited_for
        comes = engine.submit([request(name="comes")])
        await turns(3)
        runner.events[0].complete()
        await turns(12)
        (first,) = [n for n, batch in enumerate(runner.batches) if any(row.num_tokens > 1 for row in batch.rows)][1:]
        assert first == waited_for
        for stream in (stays, comes):
            async with stream:
                pass


async def test_a_step_that_fails_while_the_next_is_held_back_ends_its_rows_only():
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        engine._scheduler.step_policy.budget = DecidedWhen(None, after_s=3600.0)
        stream = engine.submit([request()])
        await turns(8)
        runner.events[0].complete(RuntimeError("a kernel"))
        await turns(8)
        runner.manual = False
        for event in runner.events[1:]:
            event.complete()
        (got,) = (await read(stream)).values()
        assert got[1] is FinishReason.ERROR
        assert (await read(engine.submit([request()])))[0][1] is FinishReason.LENGTH


async def test_a_stream_that_was_left_goes_without_a_collection():
    async with engine_on(FakeRunner()) as engine:
        gc.collect()
        gc.disable()
        try:
            await read(engine.submit([request()]))
            await turns(4)
            assert not [each for each in gc.get_objects() if type(each) is EngineTokenStream]
        finally:
            gc.enable()


async def test_a_client_that_leaves_frees_its_row_and_blocks_before_the_next_step():
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        stays, leaves = engine.submit([request(name="stays", max_tokens=9)]), engine.submit([request(name="leaves")])
        await turns(5)
        async with leaves:
            pass
        scheduler = engine._scheduler
        assert [seq.request.id for seq in scheduler.running] == ["stays"]
        check_pool(scheduler)
        check_tables(scheduler)
        num_launched = len(runner.batches)
        runner.events[0].complete()
        await turns(8)
        assert {runner.names[row.number] for batch in runner.batches[num_launched:] for row in batch.rows} == {"stays"}
        assert value(engine, "request_success", ("finished_reason", "abort")) == 1
        async with stays:
            pass


async def test_one_of_several_can_be_stopped_and_the_others_go_on():
    async with engine_on(FakeRunner()) as engine:
        stream = engine.submit([request(max_tokens=20), request(max_tokens=5)])
        seen: dict[int, int] = {0: 0, 1: 0}
        async with stream:
            async for outputs in stream:
                for output in outputs:
                    seen[output.index] += len(output.token_ids)
                if 0 < seen[0] < 20:
                    stream.stop(0)
                    seen[0] = 100
    assert seen == {0: 100, 1: 5}


async def test_stopping_the_last_open_request_ends_the_iteration_and_counts_as_a_stop():
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        stream = engine.submit([request()])
        reading = asyncio.create_task(read(stream))
        await turns(5)
        stream.stop(0)
        assert await reading == {}
        assert value(engine, "request_success", ("finished_reason", "stop")) == 1


async def test_a_slow_reader_finds_everything_in_one_output_and_slows_nobody():
    async with engine_on(FakeRunner()) as engine:
        slow = engine.submit([request(max_tokens=30)])
        async with slow:
            assert (await read(engine.submit([request(max_tokens=40)])))[0][1] is FinishReason.LENGTH
            (output,) = await slow.__anext__()
    assert output.token_ids == list(range(3, 33))
    assert output.finish is FinishReason.LENGTH


async def test_eos_stop_ids_and_length_end_with_their_own_reason():
    sample = {3: 10, 4: 20, 5: 999}
    async with engine_on(FakeRunner(lambda row: sample.get(row.end, row.end))) as engine:
        assert await read(engine.submit([request(max_tokens=9)])) == {0: ([10, 20, 999], FinishReason.STOP)}
        stream = engine.submit([request(max_tokens=9, stop_token_ids=frozenset({20}))])
        async with stream:
            last = [output async for outputs in stream for output in outputs][-1]
        assert (last.finish, last.stop_token_id) == (FinishReason.STOP, 20)
        (got,) = (await read(engine.submit([request(max_tokens=5, ignore_eos=True)]))).values()
        assert got == ([10, 20, 999, 6, 7], FinishReason.LENGTH)


async def test_a_prompt_that_cannot_fit_and_a_full_queue_are_refused_at_once():
    runner = FakeRunner(manual=True)
    async with engine_on(runner, max_num_seqs=1, admission=AdmissionLimits(1)) as engine:
        with pytest.raises(ContextTooLong):
            engine.submit([request(range(64))])
        with pytest.raises(ValueError, match="token ids"):
            engine.submit([request([1, 1000])])
        with pytest.raises(ValueError, match="at least one token"):
            engine.submit([request([])])
        engine.check_room(None)
        streams = [engine.submit([request()])]
        await turns(5)
        streams.append(engine.submit([request()]))
        with pytest.raises(QueueFull):
            engine.submit([request()])
        with pytest.raises(QueueFull):
            engine.check_room(None)  # which is known before there is a request
        streams.append(engine.submit([request()], continues=True))  # of what was let in before
        for stream in streams:
            async with stream:
                pass
        assert engine.health().num_waiting == 0


async def test_what_is_asked_for_at_once_shares_turns():
    async with engine_on(FakeRunner(manual=True)) as engine:
        streams = [engine.submit([request()] * 3), engine.submit([request()]), engine.submit([request()] * 2)]
        await turns(3)
        groups = [sequence.group for sequence in engine._scheduler.running]
        assert groups == [groups[0]] * 3 + [groups[3]] + [groups[4]] * 2
        assert len(set(groups)) == 3
        for stream in streams:
            async with stream:
                pass


async def test_a_failing_step_ends_its_requests_with_an_error_and_no_others():
    runner = FakeRunner(manual=True)
    async with engine_on(runner, max_num_seqs=1, steps_in_flight=1) as engine:
        unlucky, lucky = engine.submit([request(name="unlucky")]), engine.submit([request(name="lucky")])
        await turns(5)
        runner.events[0].complete(RuntimeError("no room"))
        (output,) = await unlucky.__anext__()
        assert output.finish is FinishReason.ERROR
        assert "no room" not in (output.error or "")
        runner.manual = False
        await turns(5)
        for event in runner.events[1:]:
            if not event.is_done():
                event.complete()
        assert await read(lucky) == {0: ([3, 4, 5, 6], FinishReason.LENGTH)}
        assert engine.health().ok


async def test_what_was_launched_behind_a_failed_step_starts_over():
    runner = FakeRunner(manual=True)
    async with engine_on(runner) as engine:
        first = engine.submit([request(name="first", max_tokens=9)])
        await turns(3)
        second = engine.submit([request((1, 2, 3, 4, 5, 6), name="second")])
        for _ in range(3):
            runner.events[-1].is_done() or await turns(1)
        runner.events[0].complete(RuntimeError())
        runner.manual = False
        await turns(3)
        for event in runner.events[1:]:
            if not event.is_done():
                event.complete()
        assert (await read(first))[0][1] is FinishReason.ERROR
        assert await read(second) == {0: ([6, 7, 8, 9], FinishReason.LENGTH)}
        check_pool(engine._scheduler)


async def test_a_row_with_unusable_logits_ends_alone():
    def sample(row) -> int:
        return NOT_FINITE if runner.names[row.number] == "bad" else row.end

    runner = FakeRunner(sample)
    async with engine_on(runner) as engine:
        got = await read(engine.submit([request(name="bad"), request(name="good")]))
    assert got == {0: ([], FinishReason.ERROR), 1: ([3, 4, 5, 6], FinishReason.LENGTH)}


async def test_draining_finishes_what_is_in_flight_and_refuses_the_rest():
    async with engine_on(FakeRunner()) as engine:
        reading = asyncio.create_task(read(engine.submit([request(max_tokens=20)])))
        draining = asyncio.create_task(engine.drain(60))
        await turns(2)
        with pytest.raises(EngineStopped):
            engine.submit([request()])
        assert await draining == 0
        assert (await reading)[0][1] is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["answer-1", "answer", "asked"])
async def test_a_request_is_aborted_by_its_id_its_answers_or_its_parents(name):
    async with engine_on(FakeRunner(manual=True)) as engine:
        asked = replace(request(name="answer-1"), parent_id="asked")
        stays = engine.submit([request(name="answers-1")])
        async with engine.submit([asked]) as stream, stays:
            assert engine.abort({"nobody"}) == 0
            assert engine.abort({name}) == 1
            async for outputs in stream:
                assert [output.finish for output in outputs] == [FinishReason.ABORT]


async def test_what_outlives_the_drain_timeout_ends_with_abort():
    async with engine_on(FakeRunner(manual=True)) as engine:
        reading = asyncio.create_task(read(engine.submit([request()])))
        await turns(3)
        assert await engine.drain(0) == 1
        assert await reading == {0: ([], FinishReason.ABORT)}


async def test_an_idle_engine_has_no_timer_and_no_pending_callback():
    async with engine_on(FakeRunner()) as engine:
        await read(engine.submit([request()]))
        await turns(5)
        loop = asyncio.get_running_loop()
        assert engine._meter._lag._timer is None
        assert not [handle for handle in loop._scheduled if not handle.cancelled()]
        assert not loop._ready


async def test_an_engine_is_idle_again_though_its_only_client_left_before_the_first_step():
    async with engine_on(FakeRunner()) as engine:
        await turns(3)  # it waits for work
        async with engine.submit([request()]):
            pass
        await turns(5)
        assert engine._meter._lag._timer is None
        assert engine.loop.idle.is_set()


async def test_a_prompt_for_which_there_is_no_memory_ends_alone():
    class Short(FakeRunner):
        """No memory for a step with a long prompt."""

        def launch(self, batch):
            if any(row.num_tokens > 20 for row in batch.rows):
                raise MemoryError
            return super().launch(batch)

    async with engine_on(Short()) as engine:
        before = asyncio.create_task(read(engine.submit([request(prompt=(1, 2), max_tokens=40)])))
        await turns(3)
        assert (await read(engine.submit([request(prompt=range(1, 50))])))[0][1] is FinishReason.ERROR
        after = await read(engine.submit([request(prompt=(1, 2), max_tokens=40)]))
        assert engine.health().ok
        assert await before == after == {0: (list(range(2, 42)), FinishReason.LENGTH)}


async def test_a_bug_in_the_loop_reaches_every_request_and_health(monkeypatch):
    engine = make_engine(FakeRunner())
    monkeypatch.setattr(engine._scheduler, "schedule", lambda: 1 / 0)
    assert await read(engine.submit([request()])) == {0: ([], FinishReason.ERROR)}
    assert not engine.health().ok
    with pytest.raises(EngineStopped, match="died"):
        engine.submit([request()])
    await engine.close()


async def test_numbers_add_up():
    async with engine_on(FakeRunner()) as engine:
        await read(engine.submit([request((1, 2, 3, 4, 5), 4)]))
        await read(engine.submit([request((1, 2, 3, 4, 5), 4)]))
        assert value(engine, "prompt_tokens") == 10
        assert value(engine, "prompt_tokens_cached") == 4
        assert value(engine, "generation_tokens") == 8
        assert value(engine, "prefix_cache_hits") == 4
        assert value(engine, "request_success", ("finished_reason", "length")) == 2
        assert sum(value(engine, "time_to_first_token_seconds").counts) == 2
        assert sum(value(engine, "inter_token_latency_seconds").counts) == 6
        assert value(engine, "num_requests_running") == 0
        assert value(engine, "kv_cache_usage_perc") == 0.0


async def test_a_server_seed_makes_the_draws_of_seedless_requests_repeatable():
    async def seeds(seed: int | None) -> list[int]:
        runner = FakeRunner()
        async with engine_on(runner, seed=seed) as engine:
            await read(engine.submit([request(), request()]))
            await read(engine.submit([request(seed=77)]))
        return [row.binding.seed for batch in runner.batches for row in batch.rows if row.binding is not None]

    assert await seeds(1) == await seeds(1)
    assert (await seeds(1))[2] == 77
    assert len({*(await seeds(1))[:2], *(await seeds(2))[:2], *(await seeds(None))[:2]}) == 6


def pooling(prompt=(1, 2, 3), name="p") -> Request:
    return Request(name, list(prompt), POOLING)


async def test_texts_that_come_with_the_same_params_are_pooled_by_the_same():
    runner, params = FakeRunner(), PoolingParams()
    async with engine_on(runner) as engine:
        async with engine.submit([Request(str(n), [n], params) for n in range(3)]) as stream:
            assert sum([len(outputs) async for outputs in stream]) == 3
        async with engine.submit([Request("other", [1], PoolingParams(use_activation=False))]) as stream:
            assert [output.finish async for outputs in stream for output in outputs] == [FinishReason.STOP]
    first, *same, other = [row.work.params for batch in runner.batches for row in batch.rows]
    assert all(each is first for each in same)
    assert (first.pooling, first.use_activation, other.use_activation) == ("last", True, False)


async def test_prompts_are_pooled_beside_others_that_generate():
    runner = FakeRunner()
    async with engine_on(runner, budget=9) as engine:
        stream = engine.submit([pooling(range(20)), request(max_tokens=3), pooling((1, 2)), pooling(range(64))])
        outputs = []
        async with stream:
            async for found in stream:
                outputs += found
        check_pool(engine._scheduler)
        assert value(engine, "request_success", ("finished_reason", "stop")) == 3
        assert value(engine, "prompt_tokens") == 20 + 3 + 2 + 64
        assert value(engine, "generation_tokens") == 3
    by_index = {index: [o for o in outputs if o.index == index] for index in range(4)}
    for index, vector in ((0, [1.0, 20.0]), (2, [3.0, 2.0]), (3, [4.0, 64.0])):
        (output,) = by_index[index]
        assert (output.pooled.tolist(), output.token_ids, output.finish) == (vector, [], FinishReason.STOP)
    assert [id for o in by_index[1] for id in o.token_ids] == [3, 4, 5]
    assert all(o.pooled is None for o in by_index[1])
    works = [row.work for batch in runner.batches for row in batch.rows if row.number == 1]
    assert works == [None, None, LAST]


async def test_a_vector_that_is_not_finite_ends_its_own_request_only():
    class Broken(FakeRunner):
        def pool(self, row):
            return None if self.names[row.number] == "bad" else super().pool(row)

    async with engine_on(Broken()) as engine:
        outputs = []
        async with engine.submit([pooling(name="bad"), pooling()]) as stream:
            async for found in stream:
                outputs += found
    assert [(o.index, o.finish) for o in outputs] == [(0, FinishReason.ERROR), (1, FinishReason.STOP)]
    assert outputs[0].pooled is None
    assert outputs[1].pooled.tolist() == [2.0, 3.0]
    assert outputs[0].error is not None


async def test_a_pooled_prompt_may_fill_the_context_and_no_more():
    async with engine_on(FakeRunner()) as engine:
        with pytest.raises(ContextTooLong):
            engine.submit([pooling(range(65))])


class CountsUp:
    """A proposer for FakeRunner, whose every third guess is wrong from its second token on."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, sequence, most):
        self.calls += 1
        first = sequence.num_known_tokens
        return [first, *([first + 1, first + 2] if self.calls % 3 else [0, 0])][:most]

    def finished(self, sequence):
        pass


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
async def test_drafts_change_no_token_and_save_steps(steps_in_flight):
    requests = [request(max_tokens=30), request((5,) * 9, 12), request((1, 2), 7, stop_token_ids=frozenset({6}))]
    expected = {
        0: (list(range(3, 33)), FinishReason.LENGTH),
        1: (list(range(9, 21)), FinishReason.LENGTH),
        2: ([2, 3, 4, 5, 6], FinishReason.STOP),
    }
    runner = FakeRunner()
    async with engine_on(runner, steps_in_flight=steps_in_flight, speculation=Speculation(CountsUp(), 3)) as engine:
        assert await read(engine.submit(requests)) == expected
        assert value(engine, "generation_tokens") == 47
        check_pool(engine._scheduler)
    longest = [row for batch in runner.batches for row in batch.rows if row.number == 1]
    assert len(longest) < 16  # for 30 tokens


async def test_answers_that_nobody_reads_any_more_are_logged_together(caplog):
    async with engine_on(FakeRunner(manual=True)) as engine:
        with caplog.at_level("INFO", "oneloop.engine"):
            for num in (1, 3):
                async with engine.submit([request(name=f"r-{index}") for index in range(num)]):
                    pass
        check_pool(engine._scheduler)
    assert [message for message in caplog.messages if "aborted" in message] == [
        "request r-0 aborted after 0 tokens",
        "request r-0 and 2 more of it aborted after 0 tokens",
    ]


async def test_what_came_of_drafts_is_counted_logged_and_told(caplog):
    now = 0.0
    async with engine_on(
        FakeRunner(clock=lambda: now), speculation=Speculation(CountsUp(), 3), clock=lambda: now
    ) as engine:
        async with engine.submit([request(max_tokens=30)]) as stream:
            async for (output,) in stream:
                last = output
        drafts, drafted = value(engine, "spec_decode_num_drafts"), value(engine, "spec_decode_num_draft_tokens")
        accepted = value(engine, "spec_decode_num_accepted_tokens")
        assert 0 < drafts < accepted < drafted <= 3 * drafts
        assert (last.num_draft_tokens, last.num_accepted_tokens) == (drafted, accepted)
        (by_place,) = [
            metric for metric in engine.metrics() if metric.name == "spec_decode_num_accepted_tokens_per_pos"
        ]
        assert [*by_place.samples] == [(("position", str(place)),) for place in range(3)]
        assert sum(by_place.samples.values()) == accepted
        assert by_place.samples[("position", "0"),] == drafts  # the first token of a guess is always right
        assert len(feature_of(engine._scheduler, DraftScheduling).speculation._rows) == 0
        with caplog.at_level("INFO", "oneloop.engine"):
            throughput = engine._meter._throughput
            throughput.maybe(throughput._since_s + 10)
        share = f"drafts of {drafted / drafts:.1f} tokens accepted {100 * accepted / drafted:.0f} %"
        assert caplog.messages[-1].endswith(f"prefix hits 0 %, {share}")


async def test_a_prefix_cache_that_was_reset_has_no_hits_and_who_runs_goes_on():
    prompt = tuple(range(10, 30))

    async def num_cached(engine) -> int:
        async with engine.submit([request(prompt, 3)]) as stream:
            return [output.num_cached_tokens async for outputs in stream for output in outputs][-1]

    async with engine_on(FakeRunner()) as engine:
        assert [await num_cached(engine) for _ in range(2)] == [0, 16]
        engine.reset_prefix_cache()
        assert [await num_cached(engine) for _ in range(2)] == [0, 16]
        async with engine.submit([request(prompt, 30)]) as stream:
            ids = list((await anext(stream))[0].token_ids)
            engine.reset_prefix_cache()  # under one that runs
            async for outputs in stream:
                ids += outputs[0].token_ids
        assert len(ids) == 30
        check_pool(engine._scheduler)


class Capturing(FakeRunner):
    """Has `late` kinds of steps to capture while idle, and `due` while steps run; each is done when the test says so."""

    def __init__(self, late: int = 0, **options) -> None:
        super().__init__(**options)
        self.late, self.due = late, 0
        self.captures: list[asyncio.Future[None]] = []

    def capture_next(self, *, idle: bool) -> asyncio.Future[None] | None:
        if self.due:
            self.due -= 1
        elif idle and self.late:
            self.late -= 1
        else:
            return None
        self.captures.append(asyncio.get_running_loop().create_future())
        return self.captures[-1]


async def test_an_idle_engine_captures_one_thing_after_another_and_has_rested_when_nothing_is_left():
    runner = Capturing(late=3)
    async with engine_on(runner) as engine:
        rested = asyncio.ensure_future(engine.loop.rested())
        for num in (1, 2, 3):
            await turns(5)
            assert len(runner.captures) == num
            assert not rested.done()
            runner.captures[-1].set_result(None)
        await rested


async def test_who_comes_to_an_engine_that_captures_waits_for_one_capture_and_the_others_wait_for_its_end():
    runner = Capturing(late=3)
    async with engine_on(runner) as engine:
        await turns(5)
        reading = asyncio.ensure_future(read(engine.submit([request()])))
        await turns(5)
        assert not runner.batches  # nothing may be launched meanwhile
        runner.captures[0].set_result(None)
        assert await reading == {0: ([3, 4, 5, 6], FinishReason.LENGTH)}
        await turns(5)
        assert len(runner.captures) == 2
        runner.captures[1].set_result(None)
        await turns(5)
        runner.captures[2].set_result(None)
        await engine.loop.rested()


async def test_what_many_steps_went_without_is_captured_between_two_of_them():
    runner = Capturing(manual=True)
    async with engine_on(runner) as engine:
        stream = engine.submit([request(max_tokens=9)])
        runner.due = 1
        await turns(9)
        assert len(runner.captures) == len(runner.batches) == 1  # in flight, and the next not launched
        runner.captures[0].set_result(None)
        await turns(9)
        assert len(runner.batches) == 2
        runner.manual = False
        for event in runner.events:
            event.complete()
        assert (await read(stream))[0][1] is FinishReason.LENGTH
