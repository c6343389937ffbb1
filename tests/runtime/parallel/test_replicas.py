"""Several engines as one: where requests go, and what is asked of all of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from runtime.api import (
    AdapterRefused,
    EngineStopped,
    FinishReason,
    ProbeFailed,
    ProfileError,
    QueueFull,
    Request,
    SamplingParams,
    SleepLevel,
)
from runtime.config import LoraLimits
from runtime.lora.adapters import Adapters
from runtime.parallel.replicas import Replicas
from runtime.weights.rules import WeightsError
from tests.fakes import FakeEngine, fake_model


def engines(num: int = 2, *, rows: int = 8, paused: bool = True) -> list[FakeEngine]:
    return [FakeEngine(model=fake_model(max_num_seqs=rows), paused=paused) for _ in range(num)]


def request(id: str, ids=(3, 4, 5), num_tokens: int = 3, **more) -> Request:
    return Request(id, ids, SamplingParams(num_tokens, ignore_eos=True), **more)


def names(engine: FakeEngine, ids) -> list[bytes]:
    return [*engine.prepare(ids).block_hashes]


def counts(several: list[FakeEngine]) -> list[int]:
    return [len(each.submitted) for each in several]


async def test_requests_go_where_there_is_least_to_do_and_in_turn_among_equals():
    several = engines(3)
    together = Replicas(several)
    for number in range(6):
        together.submit([request(str(number))])
    assert counts(several) == [2, 2, 2]
    several[1].step(3)  # its requests end
    together.submit([request("next")])
    together.submit([request("after")])
    assert counts(several) == [2, 4, 2]


async def test_a_request_goes_where_its_prefix_is_unless_that_one_is_loaded():
    several = engines(2, rows=8)
    together, ids = Replicas(several), list(range(64))
    several[1].cached.update(names(several[1], ids))
    for number in range(3):  # 2 of 8 rows more than the other: no more than a quarter
        together.submit([request(str(number), [*ids, number])])
    assert counts(several) == [0, 3]
    together.submit([request("now it is loaded", [*ids, 9])])
    assert counts(several) == [1, 3]


async def test_more_of_a_prefix_counts_and_a_prefix_that_all_have_does_not():
    several = engines(2)
    together, ids = Replicas(several), list(range(64))
    for each, length in zip(several, (64, 32), strict=True):
        each.cached.update(names(each, ids[:length]))
    together.submit([request("a", ids)])
    assert counts(several) == [1, 0]
    together.submit([request("b", ids[:32])])  # both have it, and the first has something to do
    assert counts(several) == [1, 1]


async def test_a_tenants_prefix_is_not_anothers():
    several = engines(2)
    together, ids = Replicas(several), list(range(32))
    several[1].cached.update(several[1].prepare(ids, "salt").block_hashes)
    together.submit([request("other", ids)])
    together.submit([request("own", ids, cache_salt="salt")])
    assert [[each.id for each in engine.submitted] for engine in several] == [["other"], ["own"]]


async def test_a_replica_that_sleeps_is_left_asleep():
    several = engines(2)
    together = Replicas(several)
    await several[0].sleep()
    for number in range(8):
        together.submit([request(str(number))])
    assert counts(several) == [0, 8]
    assert together.health().sleep_level is SleepLevel.AWAKE
    await several[1].wake_up()
    assert together.model.max_num_seqs == 16


async def test_answers_to_one_prompt_stay_together_and_prompts_are_spread():
    several = engines(2)
    together, ids = Replicas(several), [3, 4, 5]
    together.submit([request("n", ids), request("n", ids), request("n", ids)])
    assert counts(several) == [3, 0]
    several[0].step(3)
    prompts = [[5 + number] for number in range(6)]
    stream = together.submit([request(str(number), prompt) for number, prompt in enumerate(prompts)])
    assert counts(several) == [6, 3]
    found: dict[int, list[int]] = {}
    finished = {}
    async with stream:
        for each in several:
            each.step(3)
        async for outputs in stream:
            for output in outputs:
                found.setdefault(output.index, []).extend(output.token_ids)
                finished[output.index] = output.finish
    assert found == {number: [5 + number] * 3 for number in range(6)}
    assert set(finished.values()) == {FinishReason.LENGTH}


async def test_a_reader_that_leaves_ends_what_it_had_on_all_of_them():
    several = engines(2)
    async with Replicas(several).submit([request(str(n), [n + 1]) for n in range(4)]) as stream:
        several[0].step()
        await anext(stream)
    assert [each.live for each in several] == [[], []]
    assert {reason for each in several for _, reason in each.ended} == {FinishReason.ABORT}


async def test_a_request_that_is_stopped_says_no_more_while_the_others_go_on():
    several = engines(2)
    async with Replicas(several).submit([request(str(n), [n + 1]) for n in range(2)]) as stream:
        several[0].step()
        (first,) = await anext(stream)
        other = 1 - first.index
        several[1].step()
        await asyncio.sleep(0)  # it may have been read ahead
        stream.stop(other)
        several[0].step(2)
        rest = [output.index async for outputs in stream for output in outputs]
    assert rest == [first.index]
    assert several[1].ended == [(str(other), FinishReason.STOP)]


async def test_all_are_taken_or_none():
    several = engines(2)
    several[1].refuse = QueueFull(1, 1)
    with pytest.raises(QueueFull):
        Replicas(several).submit([request(str(n), [n + 1]) for n in range(4)])
    assert several[0].live == []


async def test_room_is_asked_of_the_one_that_would_be_chosen():
    several = engines(2)
    together = Replicas(several)
    several[0].refuse = QueueFull(1, 1)
    several[1].submit([request("a")])
    with pytest.raises(QueueFull):
        together.check_room(None)  # the one with less to do is the one that a request would go to
    several[0].refuse = None
    together.check_room(None)


async def test_what_is_asked_of_the_engine_is_asked_of_all():
    several = engines(3)
    together = Replicas(several)
    finished: list[str] = []
    together.when_finished(lambda each: finished.append(each.request.id))
    for number in range(6):
        together.submit([request(str(number), parent_id="p" if number % 2 else None)])
    assert together.health().num_running == 6
    assert together.abort({"p"}) == 3
    together.reset_prefix_cache()
    assert [each.num_resets for each in several] == [1, 1, 1]
    await together.probe()
    assert [each.num_probes for each in several] == [1, 1, 1]
    several[2].unhealthy = "stuck"
    assert (together.health().ok, together.health().reason) == (False, "stuck")
    with pytest.raises(ProbeFailed):
        await together.probe()
    several[2].unhealthy = None
    assert await together.drain(0.0) == 3
    with pytest.raises(EngineStopped):
        together.submit([request("late")])
    several[1].lets_go = False
    assert await together.close() is False
    assert all(each.closed for each in several)
    assert together.model == replace(
        several[0].model, num_kv_blocks=3072, kv_cache_bytes=3 << 30, weights_bytes=1_620_000_000, max_num_seqs=24,
        max_concurrency=12.0,
    )  # fmt: skip


async def test_sleep_is_of_all_and_over_for_who_is_asked():
    several = engines(2)
    together = Replicas(several)
    await together.sleep(SleepLevel.DROPPED)
    assert together.health().sleep_level is SleepLevel.DROPPED
    await several[0].wake_up()
    assert together.health().sleep_level is SleepLevel.AWAKE
    await together.wake_up()
    assert [each.sleep_level for each in several] == [SleepLevel.AWAKE] * 2


async def test_the_first_that_dies_is_the_death_of_all():
    several = engines(2)
    death = asyncio.ensure_future(Replicas(several).death())
    await asyncio.sleep(0)
    several[1].die("its device is gone")
    assert await death == "replica 1: its device is gone"


async def test_numbers_are_labelled_by_engine():
    several = engines(2)
    together = Replicas(several)
    together.submit([request("a")])
    found = {metric.name: metric.samples for metric in together.metrics()}
    assert found["num_requests_running"] == {(("engine", "0"),): 1.0, (("engine", "1"),): 0.0}
    assert found["request_success"].keys() == {
        (("finished_reason", reason.value), ("engine", number)) for reason in FinishReason for number in "01"
    }


async def test_a_profile_is_by_the_steps_of_the_busiest(tmp_path):
    several = engines(2)
    together = Replicas(several)
    with pytest.raises(ProfileError):
        await together.stop_profile()
    several[1].submit([request("a")])
    await together.start_profile(tmp_path / "trace", num_steps=3)
    assert (several[0].profile, several[1].profile) == (None, (tmp_path / "trace", 0, 3))
    with pytest.raises(ProfileError):
        await together.start_profile(tmp_path / "other")
    assert await together.stop_profile() == tmp_path / "trace"


class Store:
    """Adapters that are only names. `refuses`: folders that it cannot read."""

    def __init__(self) -> None:
        self.keys: dict[int, str] = {}
        self.refuses: set[str] = set()

    def read(self, key: int, path: str):
        if path in self.refuses:
            raise WeightsError(f"{path} is broken")
        self.keys[key] = path
        return self

    base, max_rank, num_parameters = "", 4, 100

    def drop(self, key: int) -> None:
        self.keys.pop(key, None)

    forget = drop

    def has(self, key: int) -> bool:
        return key in self.keys

    def leave(self) -> None: ...
    def enter(self, fresh) -> None: ...


async def test_adapters_are_loaded_by_all_under_one_key():
    several, stores = engines(2), [Store(), Store()]
    for each, store in zip(several, stores, strict=True):
        each.adapters = Adapters(LoraLimits(2, 4, 8), store)
    adapters = Replicas(several).adapters
    stores[0].refuses.add("broken")
    with pytest.raises(AdapterRefused):
        await adapters.load("x", "broken")  # this takes a number that only the first has given
    loaded = await adapters.load("a", "folder")
    assert stores[0].keys == stores[1].keys == {loaded.key: "folder"}
    assert adapters.find("a") == loaded
    newer = await adapters.load("a", "other")
    assert newer.key != loaded.key
    assert stores[0].keys == stores[1].keys == {newer.key: "other"}
    assert [each.name for each in adapters.all()] == ["a"]
    stores[1].refuses.add("half")
    with pytest.raises(AdapterRefused):
        await adapters.load("a", "half")
    assert adapters.find("a") is None
    assert several[1].adapters.find("a") is None
    assert await adapters.unload("a") is False
