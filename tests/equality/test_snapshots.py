"""Prefix caching of recurrent and hybrid models: equal greedy tokens, and turns that compute only their new tokens."""

from __future__ import annotations

import random

import pytest

from runtime.snapshots.scheduling import SnapshotScheduling
from runtime.start import start_engine
from runtime.weights.fetch import ModelFiles, resolve
from tests.equality.test_families import FAMILIES, VOCAB, drawn
from tests.equality.test_tiers import answer, config, rested, started, talk
from tests.features import feature_of, has_feature
from tests.invariants import check_pool
from tests.random_features import checked

RECURRENT = ("mamba", "bamba", "falcon-h1", "qwen 3 next")
OTHERS = ("mamba 2", "jamba", "lfm2", "zamba 2", "nemotron-h")
BLOCK = 16  # tokens of a hashed block


def _quiet(progress: object) -> None:
    pass


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory):
    found: dict[str, ModelFiles] = {}

    def of(family: str) -> ModelFiles:
        if family not in found:
            folder = tmp_path_factory.mktemp("model")
            drawn(FAMILIES[family]).save_pretrained(folder)
            found[family] = resolve(str(folder), None, _quiet)
        return found[family]

    return of


def drawn_ids(number: int, length: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def every_family(*names: str):
    return pytest.mark.parametrize(
        "family", [*names, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)]
    )


@every_family(*RECURRENT)
async def test_a_second_turn_computes_its_new_tokens_only(family, files):
    prompt, new = drawn_ids(1, 57), drawn_ids(2, 9)
    plain = await start_engine(config(num_kv_blocks=60, enable_prefix_caching=False), files(family), _quiet)
    first, _ = await answer(plain, 1, prompt)
    second, num_cached = await answer(plain, 2, [*prompt, *first, *new])
    await plain.close()
    assert num_cached == 0
    engine = await start_engine(config(num_kv_blocks=60), files(family), _quiet)
    assert await answer(engine, 1, prompt) == (first, 0)
    assert await answer(engine, 2, [*prompt, *first, *new]) == (second, len(prompt) // BLOCK * BLOCK)
    assert await answer(engine, 3, prompt) == (first, len(prompt) // BLOCK * BLOCK)
    check_pool(engine._scheduler)
    await engine.close()
    assert engine._scheduler.blocks.pool.num_free == 60


CASES = [
    {},
    {"steps_in_flight": 1},
    {"max_num_batched_tokens": 20},
    {"speculative_method": "ngram"},
    {"max_num_mixed_tokens": 7, "max_num_batched_tokens": 48},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@every_family("bamba", "qwen 3 next")
async def test_conversations_read_the_same_with_preemption(family, options, files):
    plain = await start_engine(config(num_kv_blocks=90, enable_prefix_caching=False), files(family), _quiet)
    wanted, _ = await talk(plain)
    await plain.close()
    engine = await start_engine(config(num_kv_blocks=60, **options), files(family), _quiet)
    checked(engine._scheduler, 8)
    found, num_cached = await talk(engine)
    check_pool(engine._scheduler)
    await engine.close()
    assert found == wanted
    assert engine._scheduler.sequences.num_preemptions > 0
    assert num_cached > 0
    assert engine._scheduler.blocks.pool.num_free == 60


@every_family("mamba", "falcon-h1")
async def test_a_long_answer_is_a_hit_up_to_its_last_snapshot(family, files):
    prompt = drawn_ids(3, 20)
    plain = await start_engine(config(num_kv_blocks=60, enable_prefix_caching=False), files(family), _quiet)
    engine = await start_engine(config(num_kv_blocks=60), files(family), _quiet)
    first, _ = await answer(engine, 1, prompt, max_tokens=80)
    text = [*prompt, *first, 7, 8]
    found, num_cached = await answer(engine, 2, text)
    assert num_cached == 80  # the prompt has a snapshot at 16, the answer one 64 tokens later
    assert (await answer(plain, 2, text))[0] == found
    await plain.close()
    await engine.close()


@every_family("bamba", "mamba")
async def test_a_shared_system_prompt_is_a_hit_from_the_third_request_on(family, files):
    system = drawn_ids(4, 50)
    prompts = [[*system, *drawn_ids(5 + number, 30)] for number in range(3)]
    plain = await start_engine(config(num_kv_blocks=60, enable_prefix_caching=False), files(family), _quiet)
    wanted = [(await answer(plain, n, prompt))[0] for n, prompt in enumerate(prompts)]
    await plain.close()
    engine = await start_engine(config(num_kv_blocks=60), files(family), _quiet)
    found = [await answer(engine, n, prompt) for n, prompt in enumerate(prompts)]
    await engine.close()
    assert [ids for ids, _ in found] == wanted
    assert [num_cached for _, num_cached in found] == [0, 0, 48]


@every_family("bamba", "mamba")
async def test_snapshots_come_back_from_host_and_disk(family, files, tmp_path):
    plain = await start_engine(config(num_kv_blocks=90, enable_prefix_caching=False), files(family), _quiet)
    wanted, _ = await talk(plain)
    await plain.close()
    num_blocks = {"bamba": 14, "mamba": 8, "mamba 2": 8}.get(family, 20)  # fewer than five conversations have
    small = config(num_kv_blocks=num_blocks, kv_host_bytes=4 << 20, kv_disk=str(tmp_path))
    engine = await started(small, files(family))
    checked(engine._scheduler, 6)
    found, _ = await talk(engine)
    tiers = await rested(engine)
    check_pool(engine._scheduler)
    await engine.close()
    assert found == wanted
    assert tiers.stats.hits["host"] > 0
    second = await started(small, files(family))
    _, num_cached = await answer(second, 1, wanted[0])
    tiers = await rested(second)
    await second.close()
    if family in ("bamba", "mamba"):  # a snapshot of others may have been evicted before it was copied
        assert num_cached >= 2 * BLOCK
    assert tiers.stats.hits["disk"] == num_cached


async def test_other_salts_find_no_snapshot(files):
    engine = await start_engine(config(num_kv_blocks=60), files("mamba"), _quiet)
    prompt = drawn_ids(9, 50)
    (_, mine), (_, theirs), (_, again) = [
        await answer(engine, n, prompt, salt) for n, salt in enumerate(("a", "b", "a"))
    ]
    await engine.close()
    assert (mine, theirs, again) == (0, 0, 48)


async def test_models_without_states_have_no_snapshots(files):
    engine = await start_engine(config(num_kv_blocks=60), files("llama"), _quiet)
    assert not has_feature(engine._scheduler, SnapshotScheduling)
    await engine.close()


async def test_a_failed_step_leaves_no_snapshot(files):
    engine = await start_engine(config(num_kv_blocks=60), files("bamba"), _quiet)
    scheduler = engine._scheduler
    snapshots = feature_of(scheduler, SnapshotScheduling)
    launch, failed = engine.loop.runner.launch, False

    def fails_once(batch):
        nonlocal failed
        if batch.copies and not failed:
            failed = True
            raise RuntimeError("a step that copies")
        return launch(batch)

    engine.loop.runner.launch = fails_once
    prompt = drawn_ids(11, 40)
    with pytest.raises(AssertionError):
        await answer(engine, 1, prompt)
    assert failed
    assert not [*snapshots.block_ids]
    check_pool(scheduler)
    _, num_cached = await answer(engine, 2, prompt)
    await engine.close()
    assert num_cached == 0
