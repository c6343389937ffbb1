"""What the event loop's thread takes for a step, by the number of devices that compute it: `python -m
tests.benches.devices`.

A model of narrow layers, so that nearly all is the engine's own; ranks and stages are threads of this process, and at last a stage
is a process of its own. One line for each way to share it out: microseconds of CPU that a step takes on the loop's thread, as the
least of some rounds."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import replace

import torch
import transformers

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.parallel.messages import ModelName
from runtime.parallel.processes import StageProcesses
from runtime.start import start_engine
from runtime.weights.fetch import resolve
from tests.runtime.parallel.elsewhere import ProcessLauncher

WAYS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2)]  # ranks, stages
ROWS, TOKENS, ROUNDS = 4, 120, 4


async def step_us(engine: Engine) -> float:
    params = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)
    requests = [Request(str(number), [3 + number], params) for number in range(ROWS)]
    first = engine.activity(after_step=sys.maxsize, after_request=sys.maxsize, num_cells=1).num_steps
    began_s = time.thread_time()
    async with engine.submit(requests) as stream:
        async for _ in stream:
            pass
    took_s = time.thread_time() - began_s
    last = engine.activity(after_step=sys.maxsize, after_request=sys.maxsize, num_cells=1).num_steps
    return took_s * 1e6 / (last - first)


async def main() -> None:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        files = resolve(folder, None, lambda progress: None)
        for ranks, stages in WAYS:
            options = EngineConfig(
                device="cpu", num_kv_blocks=64, max_model_len=128, tensor_parallel_size=ranks, pipeline_parallel_size=stages
            )  # fmt: skip
            await told(f"-tp {ranks} -pp {stages}", await start_engine(options, files, lambda progress: None))
        apart = replace(options, tensor_parallel_size=1, pipeline_parallel_size=2, distributed_executor_backend="ray")
        processes = StageProcesses(ProcessLauncher(), ModelName(folder, None))
        engine = await start_engine(apart, files, lambda progress: None, processes=processes)
        await told("-pp 2, a process for each stage", engine)


async def told(ways: str, engine: Engine) -> None:
    found = [await step_us(engine) for _ in range(ROUNDS)]
    await engine.close()
    print(f"{ways}: {min(found):.0f} us a step", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
