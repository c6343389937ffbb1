"""Command `python -m loadtests.engine`: start the engine, measure the requested figures, and report those that failed."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loadtests.engine.arguments import engine_config, parser
from loadtests.engine.counted import Counted
from loadtests.engine.figures import (
    emit,
    measure_decode,
    measure_pool,
    measure_prefill,
    measure_steps,
    measure_throughput,
    measure_ttft,
)
from loadtests.engine.machine import device_facts, process_age_s, status_mib
from loadtests.engine.profile import measure_profile
from loadtests.engine.workloads import MeasureError, Prompter
from runtime.api import LoadProgress

if TYPE_CHECKING:
    from runtime.engine import Engine

_OBJECTS_A_COLLECTION = 25_000  # of server/process/serve.py

Job = tuple[str, dict[str, int], Coroutine[Any, Any, None]]  # figure, what it is of, how to take it


def phases_of(reports: Sequence[tuple[float, str]], ready_s: float) -> dict[str, float]:
    """Return the duration of each phase in seconds, from its first report to that of the next phase, or to `ready_s`."""
    firsts: dict[str, float] = {}
    for moment_s, phase in reports:
        firsts.setdefault(phase, moment_s)
    ends = [*list(firsts.values())[1:], ready_s]
    return {phase: round(end - begin, 4) for (phase, begin), end in zip(firsts.items(), ends, strict=True)}


async def start(args: argparse.Namespace) -> Engine:
    """Start the engine and print the duration of each phase. The import of `runtime.start` is included."""
    age_s = process_age_s()
    from runtime.start import start_engine
    from runtime.weights.fetch import resolve

    reports: list[tuple[float, str]] = []

    def note(progress: LoadProgress) -> None:
        reports.append((time.perf_counter(), progress.phase))

    files = resolve(args.model, None, note, load_format="dummy")
    config = engine_config(vars(args), files.config)
    generates = args.batch or args.steps or args.prefill or args.ttft or args.throughput or args.profile is not None
    config = replace(config, pools=bool(args.pool) and not generates)
    speculation, draft = config.speculation, None
    if speculation is not None and speculation.model is not None:
        draft = resolve(speculation.model, None, note, load_format="dummy")
    begun_s = time.perf_counter()
    engine = await start_engine(config, files, note, draft)
    ready_s = time.perf_counter()
    await engine.loop.rested()
    gc.freeze()  # as a server has it: what is loaded stays, and is not gone through again
    gc.set_threshold(_OBJECTS_A_COLLECTION, *gc.get_threshold()[1:])
    model = engine.model
    facts = {name: getattr(model, name) for name in (
        "dtype", "num_parameters", "weights_bytes", "num_kv_blocks", "kv_block_size", "kv_cache_bytes", "max_num_seqs",
        "max_model_len",
    )}  # fmt: skip
    emit(
        "start", start_engine_s=round(ready_s - begun_s, 4), process_s_before=round(age_s, 2),
        phases_s=phases_of(reports, ready_s), rss_mib=status_mib("VmRSS"), **device_facts(model.device), **facts,
    )  # fmt: skip
    return engine


async def measure(args: argparse.Namespace) -> int:
    """Measure every requested figure. Return the number of figures that failed."""
    engine = await start(args)
    prompter, counted = Prompter(engine.model.vocab_size), Counted(engine)
    jobs: list[Job] = [
        *(("decode", {"batch": batch}, measure_decode(engine, prompter, batch, args)) for batch in args.batch),
        *(("steps", {"batch": batch}, measure_steps(engine, prompter, batch, args)) for batch in args.steps),
        *(("prefill", {"requests": p[0], "tokens": p[1]}, measure_prefill(engine, prompter, *p)) for p in args.prefill),
        *(("pool", {"texts": p[0], "tokens": p[1]}, measure_pool(engine, prompter, *p)) for p in args.pool),
        *(("ttft", {"tokens": tokens}, measure_ttft(engine, prompter, tokens)) for tokens in args.ttft),
    ]
    if args.throughput:
        jobs.append(("throughput", {}, measure_throughput(engine, args)))
    num_failed = await run_jobs(jobs)
    emit("end", peak_rss_mib=status_mib("VmHWM"), rss_mib=status_mib("VmRSS"), **counted.found())
    if args.profile is not None:  # last: it holds up the loop
        batches = args.profile_batch
        num_failed += await run_jobs(
            [("profile", {"batch": b}, measure_profile(engine, prompter, b, args)) for b in batches]
        )
    await engine.close()
    return num_failed


async def run_jobs(jobs: Sequence[Job]) -> int:
    """Run `jobs`, and print the reason of each failure. Return the number of failures."""
    num_failed = 0
    for name, facts, job in jobs:
        try:
            await job
        except MeasureError as error:
            emit(name, **facts, error=str(error))
            num_failed += 1
    return num_failed


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, stream=sys.stderr)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return 1 if runner.run(measure(args)) else 0


if __name__ == "__main__":
    sys.exit(main())
