"""Platforms: chosen once by name; and a third one serves a model through the whole engine, of which nothing else knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

import ops
import runtime
from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig, PlanError
from runtime.platform import platform as platforms
from runtime.platform.cpu import STEPS, CpuPlatform
from runtime.platform.cuda import CudaPlatform
from runtime.platform.platform import choose_platform
from runtime.policy.step_budget import EngineLoad, FixedBudget, Goals
from runtime.start import start_engine
from runtime.weights.fetch import resolve
from tests.runtime.platform.tiny import TinyPlatform

PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.9, "seed": 4, "frequency_penalty": 1.0},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


class EntryPoints(dict):
    """`installed`: functions that give platforms, by name."""

    names = property(dict.keys)

    def __init__(self, **installed) -> None:
        super().__init__({name: EntryPoint(give) for name, give in installed.items()})


class EntryPoint:
    def __init__(self, give) -> None:
        self.give = give

    def load(self):
        return self.give


@pytest.fixture
def installed(monkeypatch):
    tiny = TinyPlatform()

    def never():
        raise AssertionError("loaded though nobody named it")

    monkeypatch.setattr(platforms, "entry_points", lambda group: EntryPoints(tiny=lambda: tiny, other=never))
    yield tiny
    ops.force(None)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.25, bos_token_id=1, eos_token_id=96,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return resolve(str(folder), None, lambda progress: None)


async def outputs(config: EngineConfig, files) -> dict[int, tuple[list, list]]:
    """Of each request: ids, and what was told beside them."""
    engine = await start_engine(config, files, lambda progress: None)
    requests = [
        Request(str(number), [*range(3 + number, 20 + 9 * number)], SamplingParams(max_tokens=14, **sampling))
        for number, sampling in enumerate(PARAMS)
    ]
    answers: dict[int, tuple[list, list]] = {number: ([], []) for number in range(len(requests))}
    async with engine.submit(requests) as stream:
        async for several in stream:
            for output in several:
                assert output.error is None
                ids, tops = answers[output.index]
                ids += output.token_ids  # several at once where the reader is slow
                tops += [[token for token, _ in each.top] for each in output.logprobs or ()]
    await engine.close()
    return answers


async def test_a_third_platform_serves_a_model_as_the_cpu_does(installed, files):
    tiny = await outputs(EngineConfig(device="tiny"), files)
    assert installed.called == ["force_kernels", "refuse", "plan", "compile_ahead", "build_runner"]
    assert installed.lane.num_steps > 14
    ops.force(None)
    cpu = await outputs(
        EngineConfig(device="cpu", kernels="reference", max_num_seqs=3, max_num_batched_tokens=24), files
    )
    assert tiny == cpu


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"max_num_mixed_tokens": 7}, FixedBudget(7)),
        ({}, Goals(0.2, 1.0, STEPS.slowdown)),
        ({"max_itl": 30.0}, Goals(0.03, 0.15)),
        ({"max_itl": 30.0, "target_ttft": 50.0}, Goals(0.03, 0.05)),
    ],
)
async def test_a_cpu_times_a_step_and_bounds_prompts_beside_streams_by_it(files, asked, found):
    config = EngineConfig(device="cpu", kernels="reference", max_num_batched_tokens=64, **asked)
    engine = await start_engine(config, files, lambda progress: None)
    await engine.close()
    budget = engine._scheduler.step_policy.budget
    if isinstance(found, FixedBudget):
        assert budget == found
    else:
        assert budget.prompt_tokens(EngineLoad(1, 10, 1000)) >= (16 if found.slowdown is None else 1)
        assert (budget.goals.max_itl_s <= found.max_itl_s) if not asked else budget.goals == found
        assert budget.goals.slowdown == found.slowdown


async def test_what_a_platform_cannot_serve_it_refuses_by_name(installed, files):
    with pytest.raises(PlanError, match="kv-cache-dtype is not for a tiny device"):
        await start_engine(EngineConfig(device="tiny", kv_cache_dtype="bfloat16"), files, lambda progress: None)


def test_a_platform_that_is_not_there_is_refused_with_the_names_of_those_that_are(installed):
    with pytest.raises(PlanError, match="device npu is not known; there is auto, cpu, cuda, other, tiny"):
        choose_platform("npu")


@pytest.mark.parametrize(
    ("version", "why"), [(None, "this build of torch has no CUDA"), ("13.0", "torch finds no CUDA device")]
)
def test_a_gpu_that_is_not_there_is_said_why_and_auto_takes_the_cpu(monkeypatch, version, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(PlanError, match=f"device cuda cannot be used: {why}; use --device cpu"):
        choose_platform("cuda")
    assert isinstance(choose_platform("auto"), CpuPlatform)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(choose_platform("auto"), CudaPlatform)


def test_neither_the_start_nor_the_runner_nor_a_feature_asks_which_device_it_is():
    root = Path(runtime.__file__).parent
    files = [file for room in ("start", "runner", "sample", "pool") for file in (root / room).rglob("*.py")]
    assert len(files) > 15
    asking = re.compile(r"torch\.cuda|is_cuda|['\"]cuda['\"]|\.type\s*==")
    assert [f"{file}: {line}" for file in files for line in file.read_text().splitlines() if asking.search(line)] == []
