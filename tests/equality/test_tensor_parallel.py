"""Tensor parallel: models shared out over several ranks of one process, each on a thread of a CPU, generate what transformers does,
whatever the engine does with their prompts."""

from __future__ import annotations

import pytest
import torch

from tests.equality.devices import NATIVE, check
from tests.equality.test_families import EXPERTS, FAMILIES, SMALL, row
from tests.tiers import on_push

FOUR_RANKS = ("llama, biases, tied", "deepseek v3")


# One of each way in which layers are cut: fused and split projections, few KV heads, latent attention, experts, states.
TWO_RANKS = (
    "llama, biases, tied", "phi-3", "gemma 3", "falcon, new", "gpt-2", "deepseek v3", "gpt-oss", "qwen 3 moe",
    "granite moe, shared", "qwen 3 next", "jamba", "mamba 2", "zamba 2", "lfm2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "size"),
    on_push(
        [(name, size) for size, names in ((2, NATIVE), (4, FOUR_RANKS)) for name in names],
        *((name, 2) for name in TWO_RANKS),
        ("deepseek v3", 4),
    ),
)
def test_ranks_together_generate_what_transformers_does(name, size, tmp_path):
    check(name, tmp_path, "cpu", tensor_parallel_size=size)


@pytest.mark.parametrize(
    "eight",
    [
        row("LlamaConfig", SMALL, attention_bias=True, mlp_bias=True, num_attention_heads=8, num_key_value_heads=2),
        row(
            "Qwen3MoeConfig", EXPERTS, num_experts=9, head_dim=24, num_attention_heads=8, num_key_value_heads=4,
            moe_intermediate_size=24,
        ),
    ],
    ids=["llama", "qwen 3 moe"],
)  # fmt: skip
def test_eight_ranks_generate_what_transformers_does(eight, tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "eight heads", eight)
    check("eight heads", tmp_path, "cpu", tensor_parallel_size=8)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["llama, biases, tied", "deepseek v3", "gpt-oss", "qwen 3 next", "gemma 3"])
def test_ranks_on_two_gpus_generate_what_transformers_does(name, tmp_path):
    check(name, tmp_path, "cuda", tensor_parallel_size=2)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek v3", "ernie 4.5 moe", "granite moe, shared"])
def test_ranks_with_whole_experts_generate_what_transformers_does(name, tmp_path):
    check(name, tmp_path, "cpu", tensor_parallel_size=2, enable_expert_parallel=True)
