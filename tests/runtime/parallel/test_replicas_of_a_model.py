"""Real engines as replicas, on a CPU: their answers are one engine's, and what one has cached draws requests to it."""

from __future__ import annotations

import asyncio

import pytest

from runtime.api import CallerLimit, Request, SamplingParams
from runtime.config import EngineConfig
from runtime.parallel.replicas import Replicas
from runtime.start import SharedDevice, start_replicas
from tests.runtime.parallel.conftest import quiet


def options(copies: int, **more) -> EngineConfig:
    return EngineConfig(device="cpu", num_kv_blocks=64, max_model_len=96, data_parallel_size=copies, **more)


async def answer(engine, ids, **more) -> tuple[list[int], int]:
    """Its ids, and how many of the prompt were cached."""
    found, num_cached = [], 0
    params = SamplingParams(12, temperature=0.0, ignore_eos=True)
    async with engine.submit([Request("r", ids, params, **more)]) as stream:
        async for outputs in stream:
            for output in outputs:
                found += output.token_ids
                num_cached = output.num_cached_tokens
    return found, num_cached


@pytest.mark.parametrize("ranks", [1, 2])
async def test_answers_are_those_of_one_engine(files, ranks):
    alone = await start_replicas(options(1), files, quiet)
    replicas = await start_replicas(options(2, tensor_parallel_size=ranks), files, quiet)
    prompts = [[3 + number, 4, 5] for number in range(6)]
    try:
        assert isinstance(replicas, Replicas)
        assert replicas.model.max_num_seqs == 2 * alone.model.max_num_seqs
        assert replicas.model.num_kv_blocks == 2 * alone.model.num_kv_blocks
        expected = [await answer(alone, ids) for ids in prompts]
        assert await asyncio.gather(*(answer(replicas, ids) for ids in prompts)) == expected
        steps = [each.activity().num_steps for each in replicas.replicas]
        assert min(steps) > 0, "both have computed some of them"
    finally:
        assert await alone.close()
        assert await replicas.close()


async def test_the_next_turn_of_a_conversation_finds_what_the_last_one_left(files):
    replicas = await start_replicas(options(2), files, quiet)
    try:
        for number in range(4):
            begun = [10 + number] * 40
            await answer(replicas, begun)
            assert (await answer(replicas, [*begun, 5, 6]))[1] == 32
    finally:
        await replicas.close()


async def test_limits_of_a_caller_are_of_all_replicas_together(files):
    replicas = await start_replicas(options(2, max_num_seqs_per_key=2), files, quiet)
    params = SamplingParams(60, ignore_eos=True)
    try:
        streams = [replicas.submit([Request(id, [3], params, caller=b"a")]) for id in "ab"]
        assert [each.health().num_running + each.health().num_waiting for each in replicas.replicas] == [1, 1]
        with pytest.raises(CallerLimit):
            replicas.submit([Request("c", [3], params, caller=b"a")])
        async with replicas.submit([Request("d", [3], params, caller=b"b")]), streams[0], streams[1]:
            pass
    finally:
        await replicas.close()


async def test_a_replica_that_cannot_start_ends_the_others(files, monkeypatch):
    from runtime.start import build, ranks

    begin, closed = build.build_rank, []

    def broken(planned, files, worker, report, draft, rank=None):
        if planned.config.seed is None and len(closed) == 1:
            raise MemoryError("no room on the second")
        closed.append(worker)
        return begin(planned, files, worker, report, draft, rank)

    for module in (build, ranks):
        monkeypatch.setattr(module, "build_rank", broken)
    with pytest.raises(MemoryError, match="no room on the second"):
        await start_replicas(options(2), files, quiet)
    assert [each.num_users for each in closed] == [0]


def test_replicas_have_devices_one_behind_another():
    device = SharedDevice()
    assert [device.of_replica(number, 2).first for number in range(3)] == [0, 2, 4]
    assert device.of_replica(1, 2) is device.of_replica(1, 2)
