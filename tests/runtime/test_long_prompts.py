"""What grows with a prompt's length does not run on the event loop. Counted, not timed: ids looked at, and hashes made."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from runtime.api import FinishReason, Request, SamplingParams
from runtime.engine.prompt import prepare
from runtime.kv import prefix_cache
from runtime.kv.prefix_cache import PrefixCache
from tests.fake_runner import FakeRunner, model_info
from tests.invariants import check_pool
from tests.runtime.scheduling_case import Memory, make, run_to_end, sequence
from tests.runtime.test_engine import engine_on, read

LONG = 131_072
BUDGET = 2048
MODEL = model_info(max_model_len=LONG + 64)
ROOM = {"num_blocks": LONG // 4 + 1024, "budget": BUDGET, "model": MODEL}


class Watched(Sequence):
    """Ids that count, by thread, how many of them are allowed."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self.looks: Counter[threading.Thread] = Counter()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index):
        found = self._ids[index]
        self.looks[threading.current_thread()] += len(found) if isinstance(index, slice) else 1
        return found


@pytest.fixture
def hashed(monkeypatch) -> Counter[threading.Thread]:
    """How many blocks were hashed, by thread."""
    calls: Counter[threading.Thread] = Counter()

    def sha256(data: bytes):
        calls[threading.current_thread()] += 1
        return hashlib.sha256(data)

    monkeypatch.setattr(prefix_cache, "sha256", sha256)
    return calls


def request_of(ids, prepared) -> Request:
    return Request("long", ids, SamplingParams(3), prepared=prepared)


async def test_a_long_prompt_that_was_prepared_costs_the_loop_a_look_at_each_id_in_its_step_and_no_hash(hashed):
    ids = Watched([n % 900 for n in range(LONG)])
    here = threading.current_thread()
    runner = FakeRunner()
    async with engine_on(runner, **ROOM) as engine:
        prepared = await asyncio.to_thread(engine.prepare, ids)
        assert hashed[here] == ids.looks[here] == 0
        stream = engine.submit([request_of(ids, prepared)])
        assert ids.looks[here] == 0
        assert await read(stream) == {0: ([LONG, LONG + 1, LONG + 2], FinishReason.LENGTH)}
        check_pool(engine._scheduler)
        again = await read(engine.submit([request_of(ids, prepared)]))
    assert again == {0: ([LONG, LONG + 1, LONG + 2], FinishReason.LENGTH)}
    assert len(runner.batches) == LONG // BUDGET + 2 + 3  # the second finds all but its last block
    assert ids.looks[here] == LONG + 4
    assert hashed[here] == 0


async def test_ids_of_many_answers_to_one_prompt_are_looked_at_once():
    ids = Watched([5] * 40)
    requests = [Request(str(number), ids, SamplingParams(3)) for number in range(30)]
    async with engine_on(FakeRunner(manual=True), num_blocks=1000) as engine, engine.submit(requests):
        assert ids.looks[threading.current_thread()] == 2 * 40  # the least, and the largest


@pytest.mark.parametrize("continues", [False, True])
async def test_ids_are_looked_at_whatever_was_asked_before(continues):
    async with engine_on(FakeRunner()) as engine:
        requests = [Request(str(number), [number], SamplingParams(1)) for number in (5, 10_000)]
        with pytest.raises(ValueError, match="go from 0 to"):
            engine.submit(requests, continues=continues)


async def test_a_prompt_that_was_not_prepared_is_hashed_once_by_whoever_asks_first(hashed):
    async with engine_on(FakeRunner(), **ROOM) as engine:
        request = Request("short", list(range(40)), SamplingParams(2))
        assert await read(engine.submit([request])) == {0: ([40, 41], FinishReason.LENGTH)}
    assert hashed == {threading.current_thread(): 1 + 10}  # the root, and ten blocks


async def test_what_was_prepared_for_other_ids_or_another_tenant_is_refused():
    async with engine_on(FakeRunner()) as engine:
        ids = [1, 2, 3]
        prepared = engine.prepare(ids)
        with pytest.raises(ValueError, match="prepared prompt of other tokens"):
            engine.submit([request_of([1, 2, 3], prepared)])
        with pytest.raises(ValueError, match="prepared prompt of other tokens"):
            engine.submit([Request("r", ids, SamplingParams(3), cache_salt="mine", prepared=prepared)])
        assert await read(engine.submit([request_of(ids, prepared)])) == {0: ([3, 4, 5], FinishReason.LENGTH)}


async def test_a_prompt_that_goes_on_from_a_prepared_one_is_hashed_from_there(hashed):
    ids = list(range(40))
    async with engine_on(FakeRunner()) as engine:
        prepared = await asyncio.to_thread(engine.prepare, ids)
        longer = [*ids, 40, 41, 42, 43, 44]
        for _ in range(2):
            stream = engine.submit([request_of(longer, prepared.extended(longer))])
            assert await read(stream) == {0: ([45, 46, 47], FinishReason.LENGTH)}
        assert hashed[threading.current_thread()] == 2  # the eleventh block, each time
        assert engine._scheduler.blocks.num_prefix_hits == 44


@pytest.mark.parametrize("wrong", [-1, 1000])
@pytest.mark.parametrize("place", [0, 5000, LONG - 1])
async def test_an_id_that_no_token_has_is_found_wherever_it_stands(place, wrong):
    ids = [7] * LONG
    ids[place] = wrong
    async with engine_on(FakeRunner(), **ROOM) as engine:
        with pytest.raises(ValueError, match="go from 0 to 999"):
            engine.prepare(ids)
        with pytest.raises(ValueError, match="at least one token"):
            engine.prepare([])


@pytest.mark.parametrize("length", [1, 4, 4095, 4096, 4097, 9000])
def test_hashes_of_pieces_are_those_of_the_whole(length):
    cache = PrefixCache(4)
    ids = [n % 900 for n in range(length)]
    for root in ((None, 0), ("x", 0), ("x", 3)):
        assert prepare(cache, 1000, ids, root).block_hashes == cache.hash_blocks(ids, root)
    assert prepare(PrefixCache(4, enabled=False), 1000, ids, (None, 0)).block_hashes == []


def test_who_waits_at_the_head_of_the_line_is_looked_up_again_only_where_its_prefix_has_come_or_gone(monkeypatch):
    scheduler = make(num_blocks=16, budget=64, seqs=3)
    memory = Memory(scheduler)
    lookups = []
    monkeypatch.setattr(
        scheduler.blocks.cache,
        "_match",
        lambda *args: lookups.append(1) or PrefixCache._match(scheduler.blocks.cache, *args),
    )
    prompt = list(range(20, 50))
    scheduler.add(sequence(1, prompt, max_tokens=1))
    run_to_end(scheduler, memory)
    runs, waits = sequence(2, [60] * 20, max_tokens=20), sequence(3, [*prompt, *range(70, 94)], max_tokens=4)
    scheduler.add(runs)
    scheduler.add(waits)
    lookups.clear()
    steps = 0
    while not waits.num_output_tokens:
        batch = scheduler.schedule()
        assert batch is not None
        steps += 1
        scheduler.settle(batch, *memory.run(batch))
    assert runs.num_output_tokens == 20
    assert steps > 20
    assert len(lookups) < 10  # of which each but the first follows a block of its prefix that was taken by the other
    run_to_end(scheduler, memory)
    assert waits.num_output_tokens == 4
