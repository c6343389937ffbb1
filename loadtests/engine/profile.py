"""Profile of decode steps at a constant batch size with torch's profiler, written as a table and as JSON."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from loadtests.engine.breakdown import KernelRun, breakdown, profile_text
from loadtests.engine.counted import num_preemptions
from loadtests.engine.figures import check_room, emit
from loadtests.engine.machine import device_facts
from loadtests.engine.workloads import MeasureError, Prompter, requests_of

if TYPE_CHECKING:
    from runtime.engine import Engine

PROFILED_STEPS, SETTLED_TOKENS = 12, 4


class Profiler:
    """torch.profiler around a part of a run. It records kernels and copies (CUDA), or the outermost operators (CPU)."""

    def __init__(self, cuda: bool) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._cuda = cuda
        self._profile: Any  # most of its methods are not typed
        if cuda:
            with profile(activities=[ProfilerActivity.CUDA]):  # the first start takes seconds
                torch.zeros(1, device="cuda").add_(1)
                torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA])
        else:
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self._profile = profile(activities=[ProfilerActivity.CPU], experimental_config=config)

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> list[KernelRun]:
        self._profile.stop()
        wanted = "CUDA" if self._cuda else "CPU"
        return [
            KernelRun(event.name, event.time_range.start, event.time_range.elapsed_us())
            for event in self._profile.events() or ()
            if event.device_type.name == wanted and (self._cuda or event.cpu_parent is None)
            and not getattr(event, "is_user_annotation", False)
        ]  # fmt: skip


async def measure_profile(engine: Engine, prompter: Prompter, batch: int, args: argparse.Namespace) -> None:
    """Profile PROFILED_STEPS steps in which `batch` sequences decode; write the tables to the folder `args.profile`. Raises
    MeasureError."""
    model = engine.model
    length = min(200, model.max_model_len - args.prompt_tokens)
    check_room(engine, batch, args.prompt_tokens + length)
    profiler = Profiler(model.device.startswith("cuda"))
    tokens, begun, preemptions = [0] * batch, None, num_preemptions(engine)
    async with engine.submit(requests_of(prompter.draw(batch, args.prompt_tokens), [length] * batch)) as stream:
        async for outputs in stream:
            for output in outputs:
                tokens[output.index] += len(output.token_ids)
                if output.error is not None or output.finish is not None:
                    raise MeasureError(output.error or "a request ended before enough steps were profiled")
            if begun is None and min(tokens) >= SETTLED_TOKENS:
                profiler.start()
                begun = sum(tokens)
            elif begun is not None and sum(tokens) - begun >= PROFILED_STEPS * batch:
                break
        kernels = profiler.stop()
    assert begun is not None
    if num_preemptions(engine) > preemptions:
        raise MeasureError(f"too few KV blocks (kv-cache-bytes) for a batch of {batch}: a request was preempted")
    found = {"batch": batch, "device": device_facts(model.device)["device_name"]}
    found |= breakdown(kernels, (sum(tokens) - begun) // batch)
    args.profile.mkdir(parents=True, exist_ok=True)
    path = args.profile / f"decode-{batch}"
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".txt").write_text(profile_text(found))
    emit("profile", batch=batch, file=str(path.with_suffix(".txt")), **{
        key: found[key] for key in ("steps", "step_us", "busy_us", "idle_us", "num_kernels")
    })  # fmt: skip
