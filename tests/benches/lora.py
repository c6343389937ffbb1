"""Decode with adapters beside decode without, in one engine and in turns: `python -m tests.benches.lora --model FOLDER …`.

Weights are drawn unless the model is a file; the adapters are random, of every linear layer that may have one. Each line is a batch
size: milliseconds a step with no adapter, and with so many different ones as times that. `--gaps`: the longest pause between tokens
of that many streams while further adapters are loaded and join them, as times the median. Not a test: figures are for people.

On a busy machine `--batch 1 4 --cpu-time --rounds 7`, and the same with `--rank 8 --only q_proj v_proj`: that is what
runtime/lora/README.md tells. With --cpu-time a figure is the lower quartile of all steps, since what others do only adds."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from runtime.api import Adapter, Request, SamplingParams
from runtime.config import EngineConfig
from runtime.lora.targets import targets_of
from runtime.models.implementation import describe
from runtime.start import start_engine
from runtime.weights.fetch import resolve

if TYPE_CHECKING:
    from runtime.engine import Engine


def write_adapter(folder: Path, config: object, rank: int, dtype: torch.dtype, only: tuple[str, ...]) -> None:
    """A random adapter of the linear layers but the head, as PEFT's "all-linear" is; `only`: of those whose names end so."""
    spec = describe(config, "native")
    random, tensors, seen = torch.Generator().manual_seed(1), {}, set()
    for name, target in targets_of(spec, experts=False, vocabulary=False).modules.items():
        place = (target.linear.name, target.start)
        if place in seen or (only and not name.endswith(only)):
            continue
        seen.add(place)
        a = torch.randn(rank, target.linear.in_features, generator=random) * 0.02
        b = torch.randn(target.rows, rank, generator=random) * 0.02
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


async def decode_ms(
    engine: Engine, batch: int, adapters: list[Adapter | None], tokens: int, clock: Callable[[], float]
) -> list[float]:
    """Milliseconds of each step of `batch` rows that all decode; rows take the adapters in turn."""
    times: list[float] = []
    params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
    requests = [
        Request(f"r{row}", [5 + row % 7, 6, 7], params, adapter=adapters[row % len(adapters)]) for row in range(batch)
    ]
    left = batch
    async with engine.submit(requests) as stream:
        async for outputs in stream:
            left -= sum(output.finish is not None for output in outputs)
            if left == batch:
                times.append(clock())
    settled = times[len(times) // 4 :]
    return [1000 * (b - a) for a, b in pairwise(settled)]


async def gaps(
    engine: Engine, batch: int, adapters: list[Adapter], folder: Path, tokens: int
) -> tuple[dict[str, float], float]:
    """The longest pause in milliseconds by what happens meanwhile (nothing, an adapter is loaded, a request that has it joins), and
    the median."""
    times: list[tuple[float, str]] = []
    now = "alone"
    params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
    requests = [Request(f"g{row}", [5, 6, 7], params, adapter=adapters[row % len(adapters)]) for row in range(batch)]

    reached = {tokens * (number + 1) // 5: asyncio.Event() for number in range(3)}

    async def load_and_join() -> None:
        nonlocal now
        assert engine.adapters is not None
        for number, event in enumerate(reached.values()):
            await event.wait()
            now = "loading"
            adapter = await engine.adapters.load(f"late{number}", str(folder))
            now = "joining"
            few = SamplingParams(4, temperature=0.0, ignore_eos=True)
            async with engine.submit([Request("late", [5, 6], few, adapter=adapter)]) as stream:
                async for _ in stream:
                    pass
            now = "alone"

    joining = asyncio.create_task(load_and_join())
    async with engine.submit(requests) as stream:
        async for _ in stream:
            times.append((time.perf_counter(), now))
            if event := reached.get(len(times)):
                event.set()
    await joining
    pauses = [(1000 * (end - start), what) for (start, _), (end, what) in pairwise(times[4:])]
    longest = {what: max(ms for ms, during in pauses if during == what) for what in dict.fromkeys(w for _, w in pauses)}
    return longest, median(ms for ms, _ in pauses)


async def run(args: argparse.Namespace) -> None:
    files = resolve(args.model, None, lambda progress: None, load_format=args.load_format)
    most = max(args.adapters)
    clock = time.process_time if args.cpu_time else time.perf_counter
    typical: Callable[[list[float]], float] = (lambda ms: quantiles(ms)[0]) if args.cpu_time else median
    options = {
        "device": args.device, "dtype": args.dtype, "load_format": args.load_format, "max_num_seqs": max(args.batch) + 1,
        "max_model_len": 2048, "num_threads": 1 if args.cpu_time else None,
    }  # fmt: skip
    if args.plain:
        engine = await start_engine(EngineConfig(**options), files, lambda progress: None)
        for batch in args.batch:
            ms = typical(await decode_ms(engine, batch, [None], args.tokens, clock))
            print(f"batch {batch}: {ms:.3f} ms without --enable-lora")
        await engine.close()
        del engine
        gc.collect()  # it is in a circle with its task
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    config = EngineConfig(
        enable_lora=True, max_loras=most + 1, max_cpu_loras=most + 4, max_lora_rank=args.rank, **options
    )
    engine = await start_engine(config, files, lambda progress: None)
    assert engine.adapters is not None
    gc.collect()
    gc.freeze()  # as a server that has started
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_adapter(folder, files.config, args.rank, getattr(torch, args.lora_dtype), tuple(args.only))
        began_s = time.perf_counter()
        adapters = [await engine.adapters.load(f"a{number}", str(folder)) for number in range(most)]
        print(f"{most} adapters of {adapters[0].num_parameters} numbers: {time.perf_counter() - began_s:.2f} s to load")
        for batch in args.batch:
            kinds: list[list[Adapter | None]] = [[None], *([*adapters[:number]] for number in args.adapters)]
            kinds = [kind for kind in kinds if len(kind) <= batch]
            taken: list[list[float]] = [[] for _ in kinds]
            for _ in range(args.rounds):
                for found, kind in zip(taken, kinds, strict=True):
                    found += await decode_ms(engine, batch, kind, args.tokens, clock)
            none, *with_some = map(typical, taken)
            told = ", ".join(
                f"{len(kind)} adapters {ms / none:.3f}x" for kind, ms in zip(kinds[1:], with_some, strict=True)
            )
            print(f"batch {batch}: {none:.3f} ms without adapters; {told}", flush=True)
        if args.gaps:
            some = adapters[: min(8, most)]
            longest, usual = await gaps(engine, args.gaps, some, folder, 8 * args.tokens)
            told = ", ".join(f"{what} {ms:.2f}" for what, ms in longest.items())
            print(f"{args.gaps} streams while 3 adapters load: longest pause in ms {told}; median {usual:.2f}")
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lora-dtype", default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only", nargs="*", default=[], metavar="SUFFIX", help="of modules, such as q_proj")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gaps", type=int, default=0, metavar="STREAMS")
    parser.add_argument("--cpu-time", action="store_true", help="of the process, with one thread: on a busy machine")
    parser.add_argument("--plain", action="store_true", help="first an engine that serves no adapters")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
