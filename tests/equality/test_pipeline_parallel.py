"""Pipeline parallel: models cut into stages of one process, each on a thread of a CPU, generate what transformers does, whatever
the engine does with their prompts."""

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
from tests.equality.test_tensor_parallel import NATIVE

WAYS = {
    "in chunks, twice": ({"max_num_batched_tokens": 24}, {"together": True, "rounds": 2}),
    "with drafts and preemption": (
        {"max_num_batched_tokens": 80, "speculative_method": "ngram"},
        {"together": True, "preempting": True, "planned": True},
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_two_stages_generate_what_transformers_does(name, tmp_path):
    check(name, tmp_path, "cpu", pipeline_parallel_size=2)


@pytest.mark.parametrize("name", ["llama, biases, tied", "deepseek v3", "zamba 2", "gpt-oss"])
def test_two_stages_of_two_ranks_generate_what_transformers_does(name, tmp_path):
    check(name, tmp_path, "cpu", pipeline_parallel_size=2, tensor_parallel_size=2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["llama, biases, tied", "deepseek v3", "gpt-oss", "qwen 3 next", "gemma 3", "zamba 2"])
def test_stages_on_two_gpus_generate_what_transformers_does(name, tmp_path):
    check(name, tmp_path, "cuda", pipeline_parallel_size=2)


def check(name, tmp_path, device, **more):
    family = FAMILIES[name]
    theirs = drawn(family)
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = None  # answers are all of a length
    theirs.save_pretrained(tmp_path)
    files = resolve(str(tmp_path), None, lambda progress: None)

    async def stages(model: None, config: EngineConfig) -> EngineParts:
        options = replace(config, max_num_mixed_tokens=config.max_num_batched_tokens, **more)
        return await _built(options, files, lambda progress: None, None, SharedDevice())

    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in family.lengths if length < 50]
    prompts.append(prompts[-1][:-1])
    expected = []
    for options, how in WAYS.values():
        config = EngineConfig(
            device=device, dtype="float32", max_num_seqs=16, num_kv_blocks=64, max_model_len=64, **options
        )
        outcome = run(None, config, prompts, MAX_TOKENS, parts_of=stages, **how)
        expected = expected or references(theirs, prompts, MAX_TOKENS, outcome.token_ids)
        compare(outcome, expected)
        assert (outcome.num_preemptions > 0) == ("preempting" in how)
