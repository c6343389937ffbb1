"""Tiny random models, written by transformers' own config classes, decoded token for token as transformers does."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from runtime import features
from runtime.config import EngineConfig
from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from tests.equality.greedy import compare, references, run

VOCAB = 211
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "llama-biased-tied": lambda: transformers.LlamaConfig(
        **COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama3-rope": lambda: transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=None, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=16),
}
MAX_TOKENS = 24


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(5)
    theirs = transformers.AutoModelForCausalLM.from_config(MODELS[request.param](), dtype=torch.float32).eval()
    theirs.save_pretrained(folder)
    rng = random.Random(3)
    stem = [rng.randrange(VOCAB) for _ in range(70)]
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 2, 15, 16, 17, 33, 120, 300)]
    prompts += [[*stem, rng.randrange(VOCAB)], stem[:40], stem[:64], stem]
    files = resolve(str(folder), None, lambda progress: None)
    ours = load_model(files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None)
    drafts = run(ours, EngineConfig(num_kv_blocks=256), prompts, MAX_TOKENS, together=True).token_ids
    return ours, prompts, references(theirs, prompts, MAX_TOKENS, drafts)


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
@pytest.mark.parametrize("left_out", range(len(features.FEATURES)), ids=lambda place: features.FEATURES[place].__name__)
def test_greedy_equals_transformers_without_any_one_of_the_features(model, left_out, monkeypatch):
    decoder, prompts, expected = model
    kept = tuple(make for place, make in enumerate(features.FEATURES) if place != left_out)
    monkeypatch.setattr(features, "FEATURES", kept)
    compare(
        run(decoder, EngineConfig(max_num_batched_tokens=64, num_kv_blocks=256), prompts, MAX_TOKENS, together=True),
        expected,
    )


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("budget", [16, 512, 8192])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_greedy_equals_transformers(model, budget, together, caching):
    decoder, prompts, expected = model
    config = EngineConfig(max_num_batched_tokens=budget, num_kv_blocks=256, enable_prefix_caching=caching)
    outcome = run(decoder, config, prompts, MAX_TOKENS, together=together, rounds=2)
    print(f"{compare(outcome, expected)} of {len(prompts)} left at a tie")
    assert (outcome.num_cached_tokens > 0) == caching


def test_greedy_equals_transformers_when_blocks_run_out(model):
    decoder, prompts, expected = model
    config = EngineConfig(num_kv_blocks=24, max_model_len=330)
    outcome = run(decoder, config, prompts, MAX_TOKENS, together=True)
    print(f"{compare(outcome, expected)} of {len(prompts)} left at a tie")
    assert outcome.num_preemptions > 0
