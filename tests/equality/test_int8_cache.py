"""An int8 KV cache under a real model: the text costs it next to nothing, and what it answers does not depend on how the engine cut
the work."""

from __future__ import annotations

import asyncio

import pytest

from ops import native
from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig, WeightPolicy
from tests.equality.greedy import run
from tests.equality.scored import generate
from tests.runtime.models.test_load import load_smollm2, text_ids

INT8 = "int8_per_token_head"


@pytest.fixture(scope="module")
def decoder():
    if refusal := native.lacks("CACHE_TYPES"):
        pytest.skip(refusal)
    return load_smollm2(WeightPolicy("float32", keep_quantized=True))


def test_perplexity_stays_within_one_percent(decoder):
    request = Request("r", text_ids(), SamplingParams(0, prompt_logprobs=0))

    def loss(kv_cache_dtype: str) -> float:
        """In pieces, so that most keys are read as the cache has them."""
        config = EngineConfig(
            kv_cache_dtype=kv_cache_dtype, num_kv_blocks=64, max_num_batched_tokens=48, max_num_seqs=4
        )
        (answer,) = asyncio.run(generate(decoder, config, [request]))
        assert answer.prompt is not None
        return -sum(entry.logprob for entry in answer.prompt) / len(answer.prompt)

    wide, narrow = loss("float32"), loss(INT8)
    assert 0 < abs(narrow - wide) < 0.01  # of the logarithm


@pytest.mark.parametrize(
    ("budget", "together", "rounds"), [(512, False, 2), (16, True, 1)], ids=["prefix hits", "together, 16"]
)
def test_greedy_answers_are_the_same_however_the_work_is_cut(decoder, budget, together, rounds):
    ids = text_ids()
    prompts = [ids[:end] for end in (100, 33, 150, 1)]
    plain = EngineConfig(kv_cache_dtype=INT8, num_kv_blocks=128, max_num_seqs=8, enable_prefix_caching=False)
    whole = run(decoder, plain, prompts, 16, together=False)
    config = EngineConfig(kv_cache_dtype=INT8, num_kv_blocks=128, max_num_seqs=8, max_num_batched_tokens=budget)
    cut = run(decoder, config, prompts, 16, together=together, rounds=rounds)
    assert cut.token_ids == whole.token_ids
    assert rounds == 1 or cut.num_cached_tokens > 200
