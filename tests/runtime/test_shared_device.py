"""Engines that share a device: their steps take turns on one thread, those beside a chat are short, and each ends by itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from runtime.config import DeviceDefaults, EngineConfig, EnginePlan
from runtime.kv.kinds import Nothing
from runtime.policy.step_budget import FixedBudget, PlatformSteps, TimedBudget
from runtime.policy.step_cost import TimedSteps
from runtime.runner.worker import Worker
from runtime.start import SharedDevice
from tests.kinds import full

STEPS = PlatformSteps(longest_itl_s=0.2, least_tokens=16)
DEFAULTS = DeviceDefaults("float32", 64, 512, lambda free_bytes: free_bytes)


def plan(kinds, *, beside=True, free_bytes=1 << 30, model_len=256, **options) -> tuple[EngineConfig, EnginePlan]:
    config = EngineConfig(beside=beside, **{"pools": beside, **options})
    return config, EnginePlan.resolve(
        config, dtype="float32", layers=kinds, model_len=model_len, defaults=DEFAULTS, free_bytes=free_bytes
    )


async def test_a_thread_that_is_shared_computes_in_turn_and_ends_with_its_last_user():
    device, order = SharedDevice(), []
    one, other = device.worker(), device.worker()
    assert isinstance(one, Worker)
    assert one is other
    await asyncio.gather(
        *(each.run(lambda name=name: order.append(name)) for each, name in ((one, "a"), (other, "b"), (one, "c")))
    )
    assert order == ["a", "b", "c"]
    assert await one.close()
    await other.run(lambda: order.append("d"))
    assert order[-1] == "d"
    assert await other.close()


@pytest.mark.parametrize(
    ("token_s", "tokens"),
    [
        (0.00001, 512),  # all that a step holds takes 5 ms
        (0.0005, 256),  # 198 would take half of 200 ms, and the longest text is 256
        (0.00025, 396),
    ],
)
def test_steps_beside_a_chat_take_half_of_what_its_readers_wait_or_one_text(token_s, tokens):
    config, planned = plan((Nothing(),))
    timed = TimedSteps(0.001, token_s)
    assert planned.timed(config, timed, 1 << 20, STEPS).max_num_batched_tokens == tokens
    alone = replace(config, beside=False)
    assert planned.timed(alone, timed, 1 << 20, STEPS).max_num_batched_tokens == 512


@pytest.mark.parametrize(
    ("kinds", "options", "learns"),
    [((full(1, 8),), {}, True), ((full(1, 8),), {"pools": True}, False), ((Nothing(),), {}, False)],
)
def test_what_steps_take_is_learned_where_somebody_may_answer_beside_prompts(kinds, options, learns):
    config, planned = plan(kinds, beside=False, **options)
    budget = planned.timed(config, TimedSteps(0.001, 0.00001), 1 << 20, STEPS).step_budget()
    assert isinstance(budget, TimedBudget if learns else FixedBudget)


def test_the_cache_beside_a_chat_is_room_for_a_step_and_the_longest_prompt():
    kinds = (full(1, 8),)
    _, planned = plan(kinds)
    assert planned.num_kv_blocks == (256 + 512) // 16
    _, alone = plan(kinds, beside=False)
    assert alone.num_kv_blocks > 10 * planned.num_kv_blocks
    _, asked = plan(kinds, num_kv_blocks=20)
    assert asked.num_kv_blocks == 20


def test_a_model_that_generates_beside_another_has_room_for_some_sequences():
    kinds = (full(1, 8),)
    config, planned = plan(kinds, pools=False)
    assert planned.num_kv_blocks == 16 * (256 // 16)
    timed = planned.timed(config, TimedSteps(0.001, 0.0005), 1 << 20, STEPS)
    assert timed.max_num_batched_tokens == planned.max_num_batched_tokens
    assert timed.max_num_seqs == planned.max_num_seqs
