"""KV tiers change no token of the CUDA engine: page-locked host memory by streams of their own, a disk, preemption, a restart.

Conversations are fixed in advance, with the answers of transformers as history, so that a tie does not change later turns."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.config import INT8_CACHE, EngineConfig
from runtime.weights.fetch import ModelFiles, resolve
from tests.equality.greedy import Outcome, Reference, compare, transformers_greedy
from tests.equality.test_families import FAMILIES, VOCAB, drawn
from tests.equality.test_tiers import NUM_BLOCKS, NUM_CONVERSATIONS, NUM_TURNS, answer, config, rested, started
from tests.invariants import check_pool
from tests.random_features import checked

pytestmark = pytest.mark.gpu

DEVICE, NUM_TOKENS = "cuda", 6  # of each answer
FAMILY_NAMES = ("llama", "gemma 3", "deepseek v3", "llama 4")


@dataclass(frozen=True)
class Case:
    """A model, and the turns of its conversations: `turns[t][c]` is the prompt of conversation c with transformers' answer."""

    files: ModelFiles
    turns: list[list[Reference]]


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def case(request, tmp_path_factory) -> Case:
    folder, rng = tmp_path_factory.mktemp("model"), random.Random(3)
    theirs = drawn(FAMILIES[request.param])
    theirs.save_pretrained(folder)
    texts = [[rng.randrange(3, VOCAB) for _ in range(40)] for _ in range(NUM_CONVERSATIONS)]
    turns = []
    for _ in range(NUM_TURNS):
        turns.append([transformers_greedy(theirs, text, NUM_TOKENS) for text in texts])
        for text, reference in zip(texts, turns[-1], strict=True):
            text += [*reference.token_ids, *(rng.randrange(3, VOCAB) for _ in range(10))]
    return Case(resolve(str(folder), None, lambda progress: None), turns)


def with_tiers(folder: Path, **options: Any) -> EngineConfig:
    return config(num_kv_blocks=NUM_BLOCKS, kv_host_bytes=1 << 20, kv_disk=str(folder), device=DEVICE, **options)


async def answers(options: EngineConfig, case: Case) -> tuple[list[Outcome], dict[str, int]]:
    """Return an outcome for each turn, and the tokens that came from each tier. The last in line is preempted several times."""
    engine = await started(options, case.files)
    checked(engine._scheduler, 6)
    outcomes = []
    for turn in case.turns:
        found = await asyncio.gather(*(answer(engine, n, [*each.prompt_ids]) for n, each in enumerate(turn)))
        num_preemptions = engine._scheduler.sequences.num_preemptions
        outcomes.append(Outcome([ids for ids, _ in found], sum(num for _, num in found), num_preemptions, 0, 0))
    hits = {}
    if options.kv_host_bytes is not None:
        tiers = await rested(engine)
        check_pool(engine._scheduler)
        assert tiers.slabs.rows([0])[0].is_pinned() == (DEVICE == "cuda")
        hits = {**tiers.stats.hits}
    await engine.close()
    assert engine._scheduler.blocks.pool.num_free == engine._scheduler.blocks.pool.num_blocks
    return outcomes, hits


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_conversations_beyond_the_pool_equal_transformers(case, options, tmp_path):
    outcomes, hits = asyncio.run(answers(with_tiers(tmp_path, **options), case))
    for turn, outcome in zip(case.turns, outcomes, strict=True):
        compare(outcome, turn)
    assert outcomes[-1].num_preemptions > 0
    assert sum(hits.values()) > 0


def test_a_restart_reads_the_conversations_from_the_disk(case, tmp_path):
    _, before = asyncio.run(answers(with_tiers(tmp_path, enforce_eager=True), case))
    (outcome,), after = asyncio.run(answers(with_tiers(tmp_path), Case(case.files, case.turns[-1:])))
    compare(outcome, case.turns[-1])
    assert sum(before.values()) > 0
    assert after["disk"] > 0


@pytest.mark.parametrize("case", ["llama"], indirect=True)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", INT8_CACHE])
def test_caches_of_eight_bits_stay_close_with_tiers(case, kv_cache_dtype, tmp_path):
    """Kernels of different steps round to 8 bits differently at a tie, so most answers are equal, not all."""
    plain = config(num_kv_blocks=400, device=DEVICE, kv_cache_dtype=kv_cache_dtype)
    wanted, _ = asyncio.run(answers(plain, case))
    found, hits = asyncio.run(answers(with_tiers(tmp_path, kv_cache_dtype=kv_cache_dtype), case))
    same = [
        ids == others
        for ours, theirs in zip(found, wanted, strict=True)
        for ids, others in zip(ours.token_ids, theirs.token_ids, strict=True)
    ]
    assert sum(same) >= 0.6 * len(same)
    assert sum(hits.values()) > 0
