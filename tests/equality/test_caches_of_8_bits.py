"""KV caches of eight bits under a real model: the text costs them next to nothing, and what it answers does not depend on how the
engine cut the work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import ops
from ops import native
from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig, WeightPolicy
from runtime.models.decoder import Decoder
from tests.equality.greedy import run
from tests.equality.scored import generate
from tests.runtime.models.test_load import load_smollm2, text_ids

pytestmark = pytest.mark.nightly  # a real model by float32 references

LOSSES = {"int8_per_token_head": 0.01, "fp8": 0.03}  # of the logarithm


@pytest.fixture(scope="module", params=LOSSES)
def case(request) -> Iterator[tuple[str, Decoder]]:
    if request.param == "fp8":  # which a CPU reads by references
        ops.force("reference")
    elif refusal := native.missing:
        pytest.skip(refusal)
    yield request.param, load_smollm2(WeightPolicy("float32", keep_quantized=True))
    ops.force(None)


def test_a_text_loses_next_to_nothing(case):
    name, decoder = case
    request = Request("r", text_ids(), SamplingParams(0, prompt_logprobs=0))

    def loss(kv_cache_dtype: str) -> float:
        """In pieces, so that most keys are read as the cache has them."""
        config = EngineConfig(
            kv_cache_dtype=kv_cache_dtype, num_kv_blocks=64, max_num_batched_tokens=48, max_num_seqs=4
        )
        (answer,) = asyncio.run(generate(decoder, config, [request]))
        assert answer.prompt is not None
        return -sum(entry.logprob for entry in answer.prompt) / len(answer.prompt)

    wide, narrow = loss("float32"), loss(name)
    print(f"{name}: {narrow - wide:+.4f}")
    assert 0 < abs(narrow - wide) < LOSSES[name]


@pytest.mark.parametrize(
    ("budget", "together", "rounds"),
    [
        pytest.param(512, False, 2, id="prefix hits"),
        pytest.param(16, True, 1, id="together, 16"),
    ],
)
def test_greedy_answers_are_the_same_however_the_work_is_cut(case, budget, together, rounds):
    name, decoder = case
    num_tokens, ends = (16, (100, 33, 150, 1)) if name != "fp8" else (3, (100, 33))  # references take longer
    prompts = [text_ids()[:end] for end in ends]
    plain = EngineConfig(kv_cache_dtype=name, num_kv_blocks=128, max_num_seqs=8, enable_prefix_caching=False)
    whole = run(decoder, plain, prompts, num_tokens, together=False)
    config = EngineConfig(kv_cache_dtype=name, num_kv_blocks=128, max_num_seqs=8, max_num_batched_tokens=budget)
    cut = run(decoder, config, prompts, num_tokens, together=together, rounds=rounds)
    assert cut.token_ids == whole.token_ids
    assert rounds == 1 or cut.num_cached_tokens > 100
