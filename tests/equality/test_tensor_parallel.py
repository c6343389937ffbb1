"""Tensor parallel: models shared out over several ranks of one process, each on a thread of a CPU, generate what transformers does,
whatever the engine does with their prompts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from runtime.config import EngineConfig
from runtime.start import EngineParts, SharedDevice, _built
from runtime.weights.fetch import resolve
from tests.equality.greedy import compare, references, run
from tests.equality.test_families import FAMILIES, MAX_TOKENS, VOCAB, drawn

NATIVE = [name for name, family in FAMILIES.items() if family.model_impl == "native"]
FOUR_RANKS = ("llama, biases, tied", "deepseek v3")
WAYS = {
    "in chunks, twice": ({"max_num_batched_tokens": 24}, {"together": True, "rounds": 2}),
    "with drafts and preemption": (
        {"max_num_batched_tokens": 80, "speculative_method": "ngram"},
        {"together": True, "preempting": True, "planned": True},
    ),
}


@pytest.mark.parametrize(("name", "size"), [(name, 2) for name in NATIVE] + [(name, 4) for name in FOUR_RANKS])
def test_ranks_together_generate_what_transformers_does(name, size, tmp_path):
    check(name, size, tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["llama, biases, tied", "deepseek v3", "gpt-oss", "qwen 3 next", "gemma 3"])
def test_ranks_on_two_gpus_generate_what_transformers_does(name, tmp_path):
    check(name, 2, tmp_path, "cuda")


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek v3", "ernie 4.5 moe", "granite moe, shared"])
def test_ranks_with_whole_experts_generate_what_transformers_does(name, tmp_path):
    check(name, 2, tmp_path, "cpu", enable_expert_parallel=True)


def check(name, size, tmp_path, device, **more):
    family = FAMILIES[name]
    theirs = drawn(family)
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = None  # answers are all of a length
    theirs.save_pretrained(tmp_path)
    files = resolve(str(tmp_path), None, lambda progress: None)

    async def ranks(model: None, config: EngineConfig) -> EngineParts:
        options = replace(config, tensor_parallel_size=size, max_num_mixed_tokens=config.max_num_batched_tokens, **more)
        return await _built(options, files, lambda progress: None, None, SharedDevice())

    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in family.lengths if length < 50]
    prompts.append(prompts[-1][:-1])
    expected = []
    for options, how in WAYS.values():
        config = EngineConfig(
            device=device, dtype="float32", max_num_seqs=16, num_kv_blocks=64, max_model_len=64, **options
        )
        outcome = run(None, config, prompts, MAX_TOKENS, parts_of=ranks, **how)
        expected = expected or references(theirs, prompts, MAX_TOKENS, outcome.token_ids)
        compare(outcome, expected)
        assert (outcome.num_preemptions > 0) == ("preempting" in how)
