"""A draft model never changes an answer, whatever it guesses; and where it is the model itself, each of its guesses is right. On a
CPU and, marked gpu, on CUDA."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
import transformers

from runtime.config import EngineConfig
from runtime.models.load import load_model
from runtime.models.model import Model
from runtime.models.pair import ModelPair
from runtime.speculate.config import SpeculativeConfig
from runtime.weights.fetch import resolve
from tests.equality.greedy import run
from tests.equality.test_drafts import DEVICES, NUM_TOKENS, PROMPTS, VOCAB, assert_alike, generate
from tests.tiers import on_push

LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALLER = LLAMA | {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
WINDOWED = LLAMA | {"sliding_window": 24}
CONFIGS = {
    "model": ("LlamaConfig", LLAMA),
    "smaller": ("LlamaConfig", SMALLER),
    "windowed": ("MistralConfig", WINDOWED),
}


@pytest.fixture(scope="module", params=DEVICES)
def models(request, tmp_path_factory) -> dict[str, Model]:
    found = {}
    for number, (name, (config_class, values)) in enumerate(CONFIGS.items()):
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(number)
        config = getattr(transformers, config_class)(**values)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        files = resolve(str(folder), None, lambda progress: None)
        found[name] = load_model(
            files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, device=request.param
        )
    return found


def config_of(num: int = 4, **options) -> SpeculativeConfig:
    return SpeculativeConfig.of(
        {"method": "draft_model", "model": "drafts", "num_speculative_tokens": num, "adaptive": False} | options
    )


def generated(model: Model, draft: Model | None, **options):
    if draft is None:
        return asyncio.run(generate(model, None, **options))
    return asyncio.run(generate(ModelPair(model, draft), "planned", speculative_config=config_of(), **options))


OPTIONS = [{}, {"steps_in_flight": 1}, {"max_num_batched_tokens": 24}]
PAIRS = [("model", "smaller"), ("windowed", "smaller"), ("model", "windowed")]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("target", "drafter"), on_push(PAIRS, ("windowed", "smaller")))
def test_guesses_of_another_model_change_no_token(models, target, drafter, options):
    model, draft = models[target], models[drafter]
    plain, _ = generated(model, None, **options)
    guessed, num_drafted = generated(model, draft, **options)
    assert_alike(guessed, plain)
    assert num_drafted > 40


def test_all_guesses_of_the_model_itself_are_right(models):
    """Where no penalty, which guesses know nothing of, is asked for."""
    model = models["model"]
    config = EngineConfig(
        device=model.device, dtype="float32", num_kv_blocks=64, max_num_seqs=8, max_model_len=200,
        speculative_config=config_of(),
    )  # fmt: skip
    plain = run(model, replace(config, speculative_config=None), PROMPTS, NUM_TOKENS, together=True)
    guessed = run(ModelPair(model, model), config, PROMPTS, NUM_TOKENS, together=True, planned=True)
    assert guessed.token_ids == plain.token_ids
    assert guessed.num_draft_tokens == guessed.num_accepted_tokens > 100


@pytest.mark.parametrize(("target", "drafter"), on_push(PAIRS, ("windowed", "smaller")))
@pytest.mark.parametrize("adaptive", [True, False])
def test_neither_preemption_nor_a_prefix_found_again_changes_one(models, target, drafter, adaptive):
    model, draft = models[target], models[drafter]
    config = EngineConfig(
        device=model.device, dtype="float32", num_kv_blocks=120, max_num_seqs=4, max_model_len=200,
        speculative_config=config_of(adaptive=adaptive),
    )  # fmt: skip
    plain = run(model, replace(config, speculative_config=None), PROMPTS, NUM_TOKENS, together=True)
    cut = run(ModelPair(model, draft), config, PROMPTS, NUM_TOKENS, together=True, preempting=True, planned=True)
    again = run(ModelPair(model, draft), config, PROMPTS, NUM_TOKENS, together=True, rounds=2, planned=True)
    assert cut.token_ids == again.token_ids == plain.token_ids
    assert cut.num_preemptions > 3
    assert again.num_cached_tokens > 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("adaptive", on_push([True, False], False))
def test_what_is_looked_up_on_the_device_changes_no_token(models, options, adaptive):
    plain, _ = generated(models["windowed"], None, **options)
    given = SpeculativeConfig.of({"method": "ngram_gpu", "prompt_lookup_min": 1, "adaptive": adaptive})
    guessed, num_drafted = asyncio.run(generate(models["windowed"], "planned", speculative_config=given, **options))
    assert_alike(guessed, plain)
    assert num_drafted > 40 or adaptive


@pytest.mark.parametrize("method", ["ngram_gpu", "ngram_cpu", "suffix"])
def test_neither_do_preemption_nor_prefixes_where_texts_are_looked_up(models, method):
    """A row's new tenant brings its text with it, answer and all."""
    model, lookup = models["windowed"], {} if method == "suffix" else {"prompt_lookup_min": 1}
    given = SpeculativeConfig.of({"method": method, "adaptive": False} | lookup)
    config = EngineConfig(
        device=model.device, dtype="float32", num_kv_blocks=120, max_num_seqs=4, max_model_len=200, max_num_batched_tokens=40,
        speculative_config=given,
    )  # fmt: skip
    plain = run(model, replace(config, speculative_config=None), PROMPTS, NUM_TOKENS, together=True)
    cut = run(model, config, PROMPTS, NUM_TOKENS, together=True, preempting=True, planned=True)
    again = run(model, config, PROMPTS, NUM_TOKENS, together=True, rounds=2, planned=True)
    assert cut.token_ids == again.token_ids == plain.token_ids
    assert cut.num_preemptions > 3
    assert again.num_cached_tokens > 0
    assert min(cut.num_accepted_tokens, again.num_accepted_tokens) > 0
