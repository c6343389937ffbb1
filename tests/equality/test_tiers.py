"""KV tiers change no token: conversations whose KV does not fit in the pool, of every kind of memory that has prefix hits, with
preemption, and over a restart."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from runtime.api import Request, SamplingParams
from runtime.config import INT8_CACHE, EngineConfig
from runtime.engine import Engine
from runtime.start import start_engine, start_replicas
from runtime.tiers.scheduling import TierScheduling
from runtime.weights.fetch import ModelFiles, resolve
from tests.equality.test_families import FAMILIES, VOCAB, drawn
from tests.features import feature_of
from tests.invariants import check_pool
from tests.random_features import checked

NUM_CONVERSATIONS, NUM_TURNS, NUM_BLOCKS = 5, 3, 14


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


def config(**options: Any) -> EngineConfig:
    given = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 128, "max_num_seqs": 4}
    return EngineConfig(**given | {"max_num_batched_tokens": 32} | options)


async def started(config: EngineConfig, files: ModelFiles) -> Engine:
    """Reading is always worth it: of a tiny model, computing is as fast."""
    engine = await start_replicas(config, files, _quiet)
    assert isinstance(engine, Engine)
    for feature in engine._scheduler.features:
        if isinstance(feature, TierScheduling):
            feature.lookup.token_s = 3600.0
    return engine


async def answer(
    engine: Engine, number: int, prompt: list[int], salt: str | None = None, max_tokens: int = 6
) -> tuple[list[int], int]:
    """The answer's ids, and how many tokens of the prompt were cached."""
    params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    ids, num_cached = [], 0
    async with engine.submit([Request(str(number), prompt, params, cache_salt=salt)]) as stream:
        async for (output,) in stream:
            assert output.error is None
            ids += output.token_ids
            num_cached = max(num_cached, output.num_cached_tokens or 0)
    return ids, num_cached


async def rested(engine: Engine) -> TierScheduling:
    """Wait until all copies have ended."""
    tiers = feature_of(engine._scheduler, TierScheduling)
    while tiers._to_keep or tiers._saving or tiers._num_writing or tiers._fetches:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return tiers


def tear(folder: Path) -> None:
    """Cut the end of each file off."""
    for path in folder.glob("*/*/*.kv"):
        path.write_bytes(path.read_bytes()[:-7])


async def talk(engine: Engine) -> tuple[list[list[int]], int]:
    """All turns of all conversations, side by side; the texts, and how many tokens were cached."""
    rng = random.Random(3)
    texts = [[rng.randrange(3, VOCAB) for _ in range(40)] for _ in range(NUM_CONVERSATIONS)]
    total = 0
    for _ in range(NUM_TURNS):
        answers = await asyncio.gather(*(answer(engine, n, [*text]) for n, text in enumerate(texts)))
        for text, (ids, num_cached) in zip(texts, answers, strict=True):
            total += num_cached
            text += [*ids, *(rng.randrange(3, VOCAB) for _ in range(10))]
    return texts, total


CASES = [
    ("llama", {}),
    ("llama", {"kv_cache_dtype": INT8_CACHE}),
    ("llama", {"tensor_parallel_size": 2}),
    ("gemma 3", {}),
    ("deepseek v3", {}),
    ("llama 4", {}),
]


@pytest.mark.parametrize(("family", "options"), CASES)
async def test_conversations_beyond_the_pool_read_the_same_with_tiers(family, options, files, tmp_path):
    plain = await started(config(num_kv_blocks=400, **options), files(family))
    wanted, _ = await talk(plain)
    await plain.close()
    small = config(num_kv_blocks=NUM_BLOCKS, kv_host_bytes=1 << 20, kv_disk=str(tmp_path), **options)
    engine = await started(small, files(family))
    checked(engine._scheduler, 6)  # preemptions
    found, num_cached = await talk(engine)
    tiers = await rested(engine)
    check_pool(engine._scheduler)
    await engine.close()
    assert found == wanted
    assert num_cached > 0
    assert tiers.stats.hits["host"] + tiers.stats.hits["disk"] > 0
    assert engine._scheduler.blocks.pool.num_free == NUM_BLOCKS


async def test_a_restart_finds_a_prompt_on_the_disk(files, tmp_path):
    options = config(num_kv_blocks=NUM_BLOCKS, kv_disk=str(tmp_path))
    prompt = [5 + n % 40 for n in range(90)]
    first = await started(options, files("llama"))
    wanted, before = await answer(first, 1, prompt)
    await rested(first)
    await first.close()
    second = await started(options, files("llama"))
    found, num_cached = await answer(second, 1, prompt)
    tiers = await rested(second)
    assert (found, before, num_cached) == (wanted, 0, 80)
    assert tiers.stats.hits == {"disk": 80}
    _, salted = await answer(second, 2, prompt, salt="another tenant")
    assert salted == 0
    await second.close()


async def test_another_model_finds_nothing_in_the_folder(files, tmp_path):
    options = config(num_kv_blocks=NUM_BLOCKS, kv_disk=str(tmp_path))
    prompt = [5 + n % 40 for n in range(90)]
    for family in ("llama", "qwen2"):
        engine = await started(options, files(family))
        _, num_cached = await answer(engine, 1, prompt)
        await rested(engine)
        await engine.close()
        assert num_cached == 0


async def test_torn_files_cost_a_computation_and_no_request(files, tmp_path: Path, caplog):
    options = config(num_kv_blocks=NUM_BLOCKS, kv_disk=str(tmp_path))
    prompt = [5 + n % 40 for n in range(90)]
    first = await started(options, files("llama"))
    wanted, _ = await answer(first, 1, prompt)
    await rested(first)
    await first.close()
    tear(tmp_path)
    second = await started(options, files("llama"))
    found, num_cached = await answer(second, 1, prompt)
    await rested(second)
    await second.close()
    assert (found, num_cached) == (wanted, 0)
    assert len([record for record in caplog.records if "--kv-disk" in record.message]) == 1


async def test_what_is_slower_to_read_than_to_compute_is_computed(files):
    engine = await start_engine(config(num_kv_blocks=NUM_BLOCKS, kv_host_bytes=1 << 20), files("llama"), _quiet)
    tiers = feature_of(engine._scheduler, TierScheduling)
    assert tiers.lookup.token_s > 0, "it was measured at the start"
    tiers.lookup.token_s = 0.0
    await talk(engine)
    await rested(engine)
    await engine.close()
    assert not tiers.stats.hits
    assert tiers.stats.num_too_slow > 0
