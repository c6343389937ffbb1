"""What it costs that the two stages of a model are in two processes: `python -m tests.benches.stages`, with
`--model FOLDER`, `--batch N ...`, `--device cuda`.

Without a model, of a small one with weights: first whether two processes give one's tokens, in float32. Then milliseconds of a
decode step by batch, and of a long prompt: of one stage, of two in one process where there are devices for them, and of two in two
processes: each on a device of its own where there are two, by NCCL; else both on one, through the host."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig, PlanError
from runtime.engine import Engine
from runtime.parallel.messages import ModelName
from runtime.parallel.processes import StageProcesses
from runtime.start import start_engine
from runtime.weights.fetch import ModelFiles, resolve
from tests.runtime.parallel.elsewhere import ProcessLauncher

ROUNDS = 3


def quiet(progress: object) -> None: ...


async def generated(engine: Engine, prompts: list[list[int]], num: int) -> tuple[list[list[int]], float]:
    """Ids of each, and seconds from the first token of the last prompt to the end."""
    found: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(num, temperature=0.0, ignore_eos=True)
    requests = [Request(str(number), ids, params) for number, ids in enumerate(prompts)]
    began_s = 0.0
    async with engine.submit(requests) as stream:
        async for outputs in stream:
            for output in outputs:
                found[output.index] += output.token_ids
            if not began_s and all(found):
                began_s, before = time.perf_counter(), sum(map(len, found))
    num_steps = (sum(map(len, found)) - before) / len(found)
    return found, (time.perf_counter() - began_s) / max(num_steps, 1)


async def timed(engine: Engine, batches: list[int], num: int) -> str:
    told = []
    for batch in batches:
        rounds = [await generated(engine, [[3 + row % 50, 5] for row in range(batch)], num) for _ in range(ROUNDS)]
        told.append(f"batch {batch}: {min(each for _, each in rounds) * 1e3:.2f} ms")
    length = min(2048, engine.model.max_model_len - 8)
    took = []
    for round in range(ROUNDS):
        began_s = time.perf_counter()
        await generated(engine, [[7 + round, *[9] * (length - 1)]], 1)
        took.append(time.perf_counter() - began_s)
    return ", ".join([*told, f"prompt of {length}: {min(took) * 1e3:.1f} ms"])


async def started(files: ModelFiles, config: dict[str, Any], folder: str) -> Engine:
    if config.get("distributed_executor_backend") != "ray":
        return await start_engine(EngineConfig(**config), files, quiet)
    num_devices = torch.cuda.device_count()

    def environ(stage: int) -> dict[str, str]:
        return {} if num_devices < 2 else {"CUDA_VISIBLE_DEVICES": str(stage)}

    processes = StageProcesses(ProcessLauncher(environ), ModelName(folder, None))
    return await start_engine(EngineConfig(**config), files, quiet, processes=processes)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    config: dict[str, Any] = {
        "device": given.device, "max_model_len": 2304, "num_kv_blocks": 4096, "max_num_seqs": max(given.batch),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        folder = given.model or made
        if given.model is None:
            torch.manual_seed(0)
            sizes = transformers.LlamaConfig(
                vocab_size=96, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=4096,
            )  # fmt: skip
            transformers.LlamaForCausalLM(sizes).save_pretrained(Path(folder))
            config["dtype"] = "float32"
        else:
            config["load_format"] = "dummy"
        files = resolve(folder, None, quiet, load_format=config.get("load_format", "auto"))
        expected = None
        for name, more in (
            ("one stage", {}),
            ("two in one process", {"pipeline_parallel_size": 2}),
            ("two in two processes", {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}),
        ):
            try:
                engine = await started(files, config | more, folder)
            except PlanError as error:
                print(f"{name}: {error}", flush=True)
                continue
            try:
                if given.model is None:
                    prompts = [[3 + row, *range(4, 8 + 20 * row)] for row in range(5)]
                    prompts = [[each % 96 for each in ids] for ids in prompts]
                    ids, _ = await generated(engine, prompts, 40)
                    again, _ = await generated(engine, prompts, 40)  # cached by now
                    expected = expected or ids
                    print(f"{name}: tokens {'equal' if ids == again == expected else 'DIFFER'}")
                print(f"{name}: {await timed(engine, given.batch, given.tokens)}", flush=True)
            finally:
                await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
