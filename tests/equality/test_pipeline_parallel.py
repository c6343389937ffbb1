"""Pipeline parallel: models cut into stages of one process, each on a thread of a CPU, generate what transformers does, whatever
the engine does with their prompts."""

from __future__ import annotations

import pytest
import torch

from tests.equality.devices import NATIVE, WAYS, check
from tests.tiers import on_push

ON_PUSH = ("llama, biases, tied", "deepseek v3", "gpt-oss", "qwen 3 next", "gemma 3", "zamba 2")


@pytest.mark.parametrize("name", on_push(NATIVE, *ON_PUSH))
def test_two_stages_generate_what_transformers_does(name, tmp_path):
    """Half of the families in one way, half in the other: what stages hand on is no family's own."""
    check(name, tmp_path, "cpu", ways=[[*WAYS][NATIVE.index(name) % 2]], pipeline_parallel_size=2)


@pytest.mark.parametrize("name", ["llama, biases, tied", "deepseek v3", "zamba 2", "gpt-oss"])
def test_two_stages_of_two_ranks_generate_what_transformers_does(name, tmp_path):
    check(name, tmp_path, "cpu", pipeline_parallel_size=2, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama, biases, tied", (2, 2)),
        ("deepseek v3", (2, 1)),
        ("zamba 2", (2, 1)),
        ("gpt-oss", (2, 1)),
    ],
)
def test_stages_in_processes_of_their_own_generate_what_transformers_does(name, sizes, tmp_path):
    num_stages, size = sizes
    check(
        name, tmp_path, "cpu", pipeline_parallel_size=num_stages, tensor_parallel_size=size,
        distributed_executor_backend="ray",
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ON_PUSH)
def test_stages_on_two_gpus_generate_what_transformers_does(name, tmp_path):
    check(name, tmp_path, "cuda", pipeline_parallel_size=2)
