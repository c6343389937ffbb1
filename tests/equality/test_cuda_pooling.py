"""Encoders and causal models pooled on a CUDA device, by graphs and without: in float32 as transformers has them, in bfloat16 as
far as its rounding goes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from runtime.api import PoolingParams
from runtime.config import EngineConfig
from tests.equality import test_decoders_that_embed as decoders
from tests.equality.pooled import pooled
from tests.equality.test_encoders import ENCODERS, ours_of, transformers_output, written

pytestmark = pytest.mark.gpu

ASKED = [
    PoolingParams("token_embed", None, False), PoolingParams(pooling="mean", use_activation=False),
    PoolingParams(pooling="cls", use_activation=True, dimensions=20), PoolingParams(pooling="last", use_activation=False),
]  # fmt: skip
# Sums in another order than transformers': float32 has 24 bits, of which these tiny models lose some six.
FLOAT32 = {"atol": 2e-5, "rtol": 2e-5}


def config(**options) -> EngineConfig:
    return EngineConfig(device="cuda", max_num_seqs=24, **options)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("eager", [False, True])
async def test_hidden_states_equal_transformers(name, eager, tmp_path):
    theirs, texts = written(ENCODERS[name], "Model", tmp_path)
    model = ours_of(tmp_path, device="cuda")
    options = config(dtype="float32", enforce_eager=eager, max_num_batched_tokens=200)
    found = [await pooled(model, texts, ASKED, options, together=together) for together in (True, False)]
    for index, text in enumerate(texts):
        states = transformers_output(theirs, *text).last_hidden_state[0]
        expected = (states, states.mean(dim=0), normalize(states[0, :20], dim=0), states[-1])
        for several in found:
            for each, wanted in zip(several, expected, strict=True):
                torch.testing.assert_close(each[index], wanted, **FLOAT32)


@pytest.mark.parametrize("name", ENCODERS)
async def test_in_bfloat16_vectors_point_the_same_way(name, tmp_path):
    """Eight bits of each number, some six layers of sums: angles of a few hundredths."""
    theirs, texts = written(ENCODERS[name], "Model", tmp_path)
    model = ours_of(tmp_path, device="cuda", dtype="bfloat16")
    (found,) = await pooled(
        model, texts, [PoolingParams(pooling="mean", use_activation=True)], config(dtype="bfloat16")
    )
    for vector, text in zip(found, texts, strict=True):
        wanted = transformers_output(theirs, *text).last_hidden_state[0].mean(dim=0)
        assert cosine_similarity(vector, wanted, dim=0) > 0.998


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("budget", [40, 2048])
async def test_causal_models_pool_whole_and_in_pieces(eager, budget, tmp_path):
    theirs = decoders.written("Qwen3ForCausalLM", tmp_path)
    texts = decoders.texts() * 2
    asked = [
        PoolingParams(),
        PoolingParams(pooling="mean", use_activation=False),
        PoolingParams("token_embed", None, False),
    ]
    options = config(dtype="float32", enforce_eager=eager, max_num_batched_tokens=budget, num_kv_blocks=512)
    last, mean, all_tokens = await pooled(ours_of(tmp_path, device="cuda"), texts, asked, options)
    for index, (ids, _) in enumerate(texts):
        states = decoders.states_of(theirs.base_model, ids)
        torch.testing.assert_close(last[index], normalize(states[-1], dim=0), **FLOAT32)
        torch.testing.assert_close(mean[index], states.mean(dim=0), **FLOAT32)
        torch.testing.assert_close(all_tokens[index], states, **FLOAT32)
