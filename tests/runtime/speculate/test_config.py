"""SpeculativeConfig: vLLM's names, and what is wrong named."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from runtime.config import EngineConfig, EnginePlan
from runtime.engine_options import EngineOptions
from runtime.platform import cpu, cuda
from runtime.speculate.config import DEVICE_METHODS, METHODS, WITH_MODEL, SpeculativeConfig
from runtime.speculate.methods import PROPOSERS, speculation_of
from tests.kinds import full


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("{", "is not JSON: .* at character 2"),
        ("[1]", "is not a JSON object"),
        ({}, "method is missing: one of ngram"),
        ({"method": "ngam"}, r"unknown method 'ngam' \(did you mean ngram\?\); ngram, .* and eagle3 are served"),
        ({"method": "medusa"}, "'medusa' is not served: its heads are pickle files, .*; ngram, suffix, "),
        ({"method": "eagle3"}, "model None is not the name of a draft model"),
        ({"method": "deepseek_mtp", "model": "x/y"}, "model is for method draft_model and eagle and eagle3, not mtp"),
        ({"method": ["ngram"]}, r"unknown method \['ngram'\]"),
        ({"method": "ngram", "num_spec_tokens": 3}, r"unknown key 'num_spec_tokens' \(did you mean num_speculative_tokens\?\)"),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "unknown key 'draft_tensor_parallel_size'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens 0 is not a whole number from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "num_speculative_tokens 2.0 is not a whole"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens True is not a whole"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min 4 is more than"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "is for method ngram and ngram_gpu and ngram_cpu, not suffix"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 3}, "is for method suffix, not ngram"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "1.5 is not a number from 0 to 1"),
        ({"method": "draft_model"}, "model None is not the name of a draft model"),
        ({"method": "draft_model", "model": 3}, "model 3 is not the name"),
        ({"method": "ngram", "model": "x/y"}, "model is for method draft_model and eagle and eagle3, not ngram"),
        ({"method": "ngram", "adaptive": 1}, "adaptive 1 is neither true nor false"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given, named):
    with pytest.raises(ValueError, match=named):
        SpeculativeConfig.parse(given)


def test_synthetic_acceptance_is_said_in_capitals():
    config = SpeculativeConfig.of({"method": "ngram", "synthetic_acceptance": 0.7})
    assert str(config).endswith("; SYNTHETIC ACCEPTANCE 0.7: ANSWERS ARE NONSENSE")
    with pytest.raises(ValueError, match="synthetic_acceptance 7 is not a number from 0 to 1"):
        SpeculativeConfig.of({"method": "ngram", "synthetic_acceptance": 7})


def test_one_of_two_lengths_says_both():
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        config = SpeculativeConfig.of({"method": "ngram", name: 4})
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == (4, 4)
    config = SpeculativeConfig.of({"method": "ngram", "prompt_lookup_max": None})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (2, 5)


def test_the_plain_options_say_the_same():
    config = EngineConfig(speculative_method="suffix", num_speculative_tokens=5)
    assert config.speculation == SpeculativeConfig.parse('{"method": "suffix", "num_speculative_tokens": 5}')
    assert EngineConfig(speculative_method="ngram").speculation == SpeculativeConfig.of({"method": "ngram"})
    assert EngineConfig().speculation is None


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_an_option_and_has_a_proposer(method):
    (choices, _) = get_args(get_type_hints(EngineOptions)["speculative_method"])
    assert get_args(choices) == METHODS
    assert {*METHODS} == {"ngram", *PROPOSERS, *DEVICE_METHODS}
    for adaptive in (True, False):
        given = {"method": method, "num_speculative_tokens": 3, "adaptive": adaptive}
        config = SpeculativeConfig.of(given | ({"model": "x/y"} if method in WITH_MODEL else {}))
        told = speculation_of(config, 0.1)
        assert (told._most, told.on_device) == (3, config.on_device)
        by = f"{method} x/y" if method in WITH_MODEL else method
        assert str(config) == f"{by}, {'up to ' if adaptive else ''}3 drafts of a sequence in a step"


def test_ngram_looks_up_where_that_is_best_and_the_others_where_they_say():
    for method, on_cuda, on_cpu in (
        ("ngram", "ngram_gpu", "ngram_cpu"),
        ("ngram_gpu", "ngram_gpu", "ngram_gpu"),
        ("ngram_cpu", "ngram_cpu", "ngram_cpu"),
        ("suffix", "suffix", "suffix"),
    ):
        config = SpeculativeConfig.of({"method": method, "num_speculative_tokens": 3})
        assert config.where(on_device=True).method == on_cuda
        assert config.where(on_device=False).method == on_cpu
        assert config.where(on_device=True).reads_predictions
    lengths = SpeculativeConfig.of({"method": "ngram", "prompt_lookup_max": 4}).where(on_device=True).lookup(99)
    assert lengths == (4, 4, 99)


@pytest.mark.parametrize(
    ("defaults", "options", "method"),
    [
        (cuda.DEFAULTS, {}, "ngram_gpu"),
        (cpu.DEFAULTS, {}, "ngram_cpu"),
        (cuda.DEFAULTS, {"tensor_parallel_size": 2}, "ngram_cpu"),
    ],
)
def test_a_plan_says_where(defaults, options, method):
    config = EngineConfig(speculative_method="ngram", num_kv_blocks=9, max_num_seqs=4, **options)
    plan = EnginePlan.resolve(
        config, dtype="float32", layers=(full(1, 8, None),), model_len=64, defaults=defaults, free_bytes=0
    )
    assert plan.speculative is not None
    assert plan.speculative.method == method
