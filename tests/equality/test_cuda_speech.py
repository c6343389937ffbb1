"""The CUDA engine decodes tiny random Whispers as transformers does: by graphs and without, in chunks, preempted, with
timestamps, and from caches of eight bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime.api import TranscriptRules
from runtime.config import EngineConfig, WeightPolicy
from runtime.models import implementation
from runtime.weights.fetch import resolve
from tests.equality.greedy import compare
from tests.equality.media import Prompt, Seen, run
from tests.equality.test_whisper import CONFIG, PARAMS, SMALL, heard, load, saved, transformers_greedy

pytestmark = pytest.mark.gpu

WIDE = SMALL | {
    "d_model": 128, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 192,
    "decoder_ffn_dim": 192, "num_mel_bins": 16,
}  # fmt: skip
CONFIGS = {
    "heads of 64": WIDE,
    "turbo, 128 bands": WIDE | {"encoder_layers": 3, "decoder_layers": 1, "num_mel_bins": 128},
    "heads of 16": SMALL | {"encoder_attention_heads": 2, "decoder_attention_heads": 2},
}
# Rounding moves logits, which span 2, by up to 0.37 in bfloat16; fp8 caches left the text at margins up to 0.09 on a CPU.
BFLOAT16_TIE, CACHE_TIE = 0.4, 0.25


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("whisper"), CONFIGS[request.param]
    theirs = saved(folder, config)
    sounds = [heard(number, config["num_mel_bins"]) for number in range(4)]
    ids = [int(each) for each in np.random.default_rng(1).integers(1, 120, 40)]
    lengths = ((3, 0), (4, 1), (1, 2), (38, 3), (38, 0), (36, 3))
    prompts = [Prompt(ids[:length], (sounds[number],)) for length, number in lengths]
    return folder, prompts, [transformers_greedy(theirs, prompt) for prompt in prompts]


def decode(folder, prompts, *, params=PARAMS, dtype="float32", together=True, preempting=False, **options) -> Seen:
    files = resolve(str(folder), None, lambda progress: None)
    model = implementation.load(
        implementation.describe(files.config, "native"), files, dtype=dtype, load_format="auto", seed=0,
        progress=lambda progress: None, max_model_len=64, device="cuda", weights=WeightPolicy(dtype),
    )  # fmt: skip
    config = EngineConfig(
        **{"device": "cuda", "dtype": dtype, "num_kv_blocks": 96, "max_model_len": 64, "max_num_seqs": 8, **options}
    )
    return run(model, config, prompts, params, together=together, preempting=preempting)


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"steps_in_flight": 1}, {"together": False}, {"max_num_batched_tokens": 16}],
    ids=lambda options: ", ".join(f"{key} {value}" for key, value in options.items()) or "as it comes",
)
def test_float32_equals_transformers(case, options):
    folder, prompts, expected = case
    compare(decode(folder, prompts, **options).outcome, expected)


def test_preempted_sequences_equal_transformers(case):
    folder, prompts, expected = case
    seen = decode(folder, prompts, preempting=True)
    assert seen.outcome.num_preemptions > 0
    compare(seen.outcome, expected)


def test_bfloat16_stays_close(case):
    folder, prompts, expected = case
    for options in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 16}):
        compare(decode(folder, prompts, dtype="bfloat16", **options).outcome, expected, BFLOAT16_TIE)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8_per_token_head"])
def test_caches_of_eight_bits_stay_close(case, kv_cache_dtype):
    folder, prompts, expected = case
    compare(decode(folder, prompts, kv_cache_dtype=kv_cache_dtype).outcome, expected, CACHE_TIE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8_per_token_head"])
def test_a_graph_computes_what_its_kernels_do_without_it(case, dtype, kv_cache_dtype):
    """Four rows fill a captured shape, so both run the same kernels."""
    folder, prompts, _ = case
    four = [prompts[0]] * 4
    captured = decode(folder, four, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    eager = decode(folder, four, dtype=dtype, kv_cache_dtype=kv_cache_dtype, enforce_eager=True)
    assert captured.outcome.token_ids == eager.outcome.token_ids


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_timestamps_follow_the_same_rules_as_on_a_cpu(case, enforce_eager):
    folder, prompts, _ = case
    params = replace(PARAMS, transcript=TranscriptRules(frozenset({3, 89}), frozenset({7}), 90, 85, 10))
    expected = run(load(folder), CONFIG, prompts, params).outcome.token_ids
    assert all(90 <= ids[0] <= 100 for ids in expected)
    assert decode(folder, prompts, params=params, enforce_eager=enforce_eager).outcome.token_ids == expected
