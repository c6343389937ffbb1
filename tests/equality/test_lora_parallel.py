"""Adapters of models that are shared out over ranks: answers are those of transformers' model with each adapter merged."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from runtime.config import EngineConfig
from runtime.lora.targets import targets_of
from runtime.models import implementation
from runtime.start import start_engine
from runtime.weights.fetch import resolve
from tests.equality.adapters import embeddings, expert_parameters, is_tied, linear_modules, merged, write_adapter
from tests.equality.greedy import references
from tests.equality.test_families import FAMILIES, VOCAB, drawn
from tests.equality.test_lora import CHOSEN, MAX_TOKENS, answer, assert_same, true_shape
from tests.tiers import on_push

WHOLE_EXPERTS = ("gpt-oss", "deepseek v3")


@pytest.mark.parametrize("name", on_push(CHOSEN, "llama, biases, tied", "phi-3", "qwen 3 moe", "jamba"))
async def test_ranks_together_say_what_each_merged_model_would(name, tmp_path):
    await check(name, tmp_path, "cpu")


@pytest.mark.parametrize("name", WHOLE_EXPERTS)
async def test_ranks_with_whole_experts_say_what_each_merged_model_would(name, tmp_path):
    await check(name, tmp_path, "cpu", enable_expert_parallel=True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["llama, biases, tied", "phi-3", "gpt-oss", "qwen 3 next"])
async def test_ranks_on_two_gpus_say_what_each_merged_model_would(name, tmp_path):
    await check(name, tmp_path, "cuda", lora_experts=True, lora_vocabulary=True)


async def check(name, tmp_path, device, **options):
    """Three adapters and none over two slots, in chunks; again when the model has slept."""
    theirs = drawn(FAMILIES[name])
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = None  # answers are all of a length
    theirs.save_pretrained(tmp_path)
    files = resolve(str(tmp_path), None, lambda progress: None)
    targets = targets_of(implementation.describe(files.config, "native"))
    modules = linear_modules(theirs, targets) | ({} if is_tied(theirs) else embeddings(theirs, targets))
    experts = {
        module: {each: true_shape(theirs.get_submodule(module), each) for each in parameters}
        for module, parameters in expert_parameters(theirs, targets).items()
    }
    config = EngineConfig(
        device=device, dtype="float32", tensor_parallel_size=2, enable_lora=True, max_loras=2, max_cpu_loras=2,
        max_lora_rank=8, num_kv_blocks=64, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, **options,
    )  # fmt: skip
    engine = await start_engine(config, files, lambda progress: None)
    assert engine.adapters is not None
    try:
        deltas = {None: {}}
        for number, rank in enumerate((4, 8, 3)):
            folder = tmp_path / f"adapter{number}"
            deltas[f"a{number}"] = write_adapter(folder, modules, number, rank=rank, experts=experts)
            await engine.adapters.load(f"a{number}", str(folder))
        rng = random.Random(2)
        prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (21, 5)]
        asked = [(name, prompt) for prompt in prompts for name in deltas]
        answers = await asyncio.gather(*(answer(engine, *each) for each in asked))
        await engine.sleep()
        answers += [await answer(engine, *asked[1])]
        for (name, prompt), (ids, _) in zip([*asked, asked[1]], answers, strict=True):
            with merged(theirs, deltas[name]):
                (expected,) = references(theirs, [prompt], MAX_TOKENS, [ids])
            assert_same(ids, expected, f"{name}, {len(prompt)} tokens")
        assert engine.adapters.slots.num_slot_evictions > 0
    finally:
        await engine.close()
