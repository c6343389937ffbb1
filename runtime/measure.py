"""Measure: step times, prefill rates, start-up and a kernel profile of the real engine, as JSON lines on standard output.

`python -m runtime.measure --model FOLDER [--ENGINE-OPTION VALUE …]`; people use `python -m loadtests steps`, which runs it and
makes the table. The engine is the one that serves, built by `start_engine` on uvloop, with dummy weights unless told otherwise;
every field of EngineConfig is an option here. Each figure is a line as soon as it is taken. Knows nothing of HTTP or text.

Definitions. Decode at batch B: B prompts of random ids, greedy; (time of N + 1 tokens - time of 1) / N. Prefill AxT: A prompts
of T ids submitted together with max_tokens 1, prompt tokens by the time until all have their token. TTFT: submit to first token.
Throughput: 256 requests at temperature 0.6; all draws come from one random.Random(0): for each request its input length and then
its ids (0 to 10,000), and when all inputs are drawn, the output lengths: 142,827 tokens in and 133,966 out."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import statistics
import sys
import time
import typing
from collections import Counter, defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.api import HistogramData, LoadProgress, Request, SamplingParams
from runtime.config import EngineConfig

if TYPE_CHECKING:
    from runtime.engine import Engine

DEFAULT_MODEL_LEN, DEFAULT_SEQS = 16_384, 512  # as vLLM was measured
PREFILL_REPEATS, TTFT_REPEATS, PROFILED_STEPS, SETTLED_TOKENS = 3, 10, 12, 4
GAP, LAG = "gpu_idle_gap_seconds", "loop_lag_seconds"
Prompts = Sequence[Sequence[int]]
Job = tuple[str, dict[str, int], Coroutine[Any, Any, None]]  # figure, what it is of, how to take it


class MeasureError(Exception):
    """A figure that cannot be taken with these options, or a request that failed."""


def emit(figure: str, **values: Any) -> None:
    print(json.dumps({"figure": figure, **values}), flush=True)


# --- options ------------------------------------------------------------------------------------------------------


def pair(text: str) -> tuple[int, int]:
    """`8x8192`: requests and tokens of each."""
    requests, _, tokens = text.partition("x")
    return int(requests), int(tokens)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime.measure", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="a folder with a config.json; weights are drawn at random")
    add("--batch", type=int, nargs="*", default=[], metavar="B", help="decode step time at these batch sizes")
    add("--prefill", type=pair, nargs="*", default=[], metavar="AxT", help="prefill rates, such as 8x8192")
    add("--ttft", type=int, nargs="*", default=[], metavar="T", help="time to first token of one prompt of T ids")
    add("--throughput", action="store_true", help="the workload of many requests of mixed lengths")
    add(
        "--profile", type=Path, metavar="DIR", help="a table of the kernels of settled decode steps, at --profile-batch"
    )
    add("--profile-batch", type=int, nargs="*", default=[1], metavar="B")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="decode: length of each prompt (512)")
    add("--decode-tokens", type=int, default=128, metavar="N", help="decode: steps that are timed (128)")
    add("--repeat", type=int, default=3, metavar="N", help="decode: the median of this many (3)")
    add("--throughput-requests", type=int, default=256, metavar="N")
    add("--throughput-lengths", type=int, nargs=2, default=[100, 1024], metavar=("LEAST", "MOST"))
    add("--verbose", action="store_true", help="the engine's log on standard error")
    engine = parser.add_argument_group("engine (runtime.config.EngineConfig)")
    hints = typing.get_type_hints(EngineConfig)
    for option in fields(EngineConfig):
        kinds = [kind for kind in (*typing.get_args(hints[option.name]), hints[option.name]) if kind is not type(None)]
        flag = "--" + option.name.replace("_", "-")
        if hints[option.name] is bool:
            engine.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
        elif kinds[0] in (int, float, str) and option.default is not MISSING:
            engine.add_argument(flag, type=kinds[0], default=argparse.SUPPRESS)
    return parser


def engine_config(given: Mapping[str, Any], model_config: Mapping[str, Any]) -> EngineConfig:
    """What was asked over the defaults of a measurement: no prefix cache, lengths and rows as vLLM had, and all prompts in before
    any decodes for long, since otherwise the time of a decode would be that of other rows' prompts."""
    asked = {option.name: given[option.name] for option in fields(EngineConfig) if option.name in given}
    longest = int(model_config.get("max_position_embeddings", DEFAULT_MODEL_LEN))
    defaults = EngineConfig(
        load_format="dummy", enable_prefix_caching=False, max_model_len=min(DEFAULT_MODEL_LEN, longest),
        max_num_seqs=DEFAULT_SEQS, max_num_mixed_tokens=1 << 20, max_queue=1 << 16, seed=0,
    )  # fmt: skip
    return replace(defaults, **asked)


# --- what the engine counts ---------------------------------------------------------------------------------------


def histogram(engine: Engine, name: str) -> HistogramData | None:
    for metric in engine.metrics():
        if metric.name == name:
            data = next(iter(metric.samples.values()), None)
            return data if isinstance(data, HistogramData) else None
    return None


def spread(before: HistogramData | None, after: HistogramData | None) -> dict[str, float] | None:
    """Count, mean and bucket bounds (upper, in seconds) of p50, p90, p99 of what was observed between two readings."""
    if before is None or after is None:
        return None
    counts = [late - early for late, early in zip(after.counts, before.counts, strict=True)]
    total = sum(counts)
    if not total:
        return None
    found = {"count": float(total), "mean_s": (after.sum - before.sum) / total}
    for percent in (50, 90, 99):
        reached = 0
        for bound, count in zip((*after.bounds, float("inf")), counts, strict=True):
            reached += count
            if reached >= total * percent / 100:
                found[f"p{percent}_s_at_most"] = bound if bound != float("inf") else -1.0
                break
    return found


class Counted:
    """A block whose GPU gaps and loop lag are wanted: `found()` after it. What the engine does not count is left out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = {name: histogram(engine, name) for name in (GAP, LAG)}

    def found(self) -> dict[str, Any]:
        spreads = {name: spread(self._before[name], histogram(self._engine, name)) for name in (GAP, LAG)}
        return {name.removesuffix("_seconds"): values for name, values in spreads.items() if values is not None}


def status_mib(name: str) -> float:
    """VmRSS or VmHWM of this process in MiB (getrusage would tell the peak of whoever started us)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def process_age_s() -> float:
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


# --- requests -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timing:
    first_s: float  # submit to the first token of any request
    total_s: float  # submit to the last token of all
    num_tokens: int


def requests_of(prompts: Prompts, lengths: Sequence[int], temperature: float = 0.0) -> list[Request]:
    return [
        Request(f"measure-{index}", prompt, SamplingParams(length, temperature, ignore_eos=True))
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


async def generate(engine: Engine, prompts: Prompts, lengths: Sequence[int] | int, temperature: float = 0.0) -> Timing:
    """All of them in one submit, read to the end.

    Raises MeasureError."""
    wanted = [lengths] * len(prompts) if isinstance(lengths, int) else lengths
    requests = requests_of(prompts, wanted, temperature)
    first_s, num_tokens = None, 0
    started_s = time.perf_counter()
    async with engine.submit(requests) as stream:
        async for outputs in stream:
            if first_s is None:
                first_s = time.perf_counter() - started_s
            for output in outputs:
                num_tokens += len(output.token_ids)
                if output.error is not None:
                    raise MeasureError(output.error)
    total_s = time.perf_counter() - started_s
    if first_s is None or num_tokens != sum(wanted):
        raise MeasureError(f"{num_tokens} tokens came of {sum(wanted)}")
    return Timing(first_s, total_s, num_tokens)


@dataclass(slots=True)
class Prompter:
    """Random prompts, never the same twice, from a seed."""

    vocab_size: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def draw(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        ids = range(min(100, self.vocab_size - 1), self.vocab_size)
        return [self.rng.choices(ids, k=num_tokens) for _ in range(num_prompts)]


# --- figures ------------------------------------------------------------------------------------------------------


def check_room(engine: Engine, batch: int, num_tokens: int) -> None:
    """Raises MeasureError where they would wait for one another: that would be another figure."""
    model = engine.model
    blocks = batch * engine.most_blocks(num_tokens)
    if batch > model.max_num_seqs:
        raise MeasureError(f"a batch of {batch} is more than max-num-seqs {model.max_num_seqs}")
    if num_tokens > model.max_model_len:
        raise MeasureError(f"{num_tokens} tokens are more than max-model-len {model.max_model_len}")
    if blocks > model.num_kv_blocks:
        raise MeasureError(f"{blocks} KV blocks are needed and there are {model.num_kv_blocks}")


async def measure_decode(engine: Engine, prompter: Prompter, batch: int, args: argparse.Namespace) -> None:
    prompt, steps = args.prompt_tokens, args.decode_tokens
    check_room(engine, batch, prompt + steps + 1)
    await generate(engine, prompter.draw(batch, prompt), min(8, steps + 1))
    counted, step_ms = Counted(engine), []
    for _ in range(args.repeat):
        one = await generate(engine, prompter.draw(batch, prompt), 1)
        many = await generate(engine, prompter.draw(batch, prompt), steps + 1)
        step_ms.append((many.total_s - one.total_s) * 1000 / steps)
    emit("decode", batch=batch, ms=statistics.median(step_ms), runs=step_ms, **counted.found())


async def measure_prefill(engine: Engine, prompter: Prompter, num_prompts: int, num_tokens: int) -> None:
    if num_tokens + 1 > engine.model.max_model_len:
        raise MeasureError(f"{num_tokens} tokens and one are more than max-model-len {engine.model.max_model_len}")
    await generate(engine, prompter.draw(num_prompts, num_tokens), 1)
    counted, rates = Counted(engine), []
    for _ in range(PREFILL_REPEATS):
        timing = await generate(engine, prompter.draw(num_prompts, num_tokens), 1)
        rates.append(num_prompts * num_tokens / timing.total_s)
    rate = statistics.median(rates)
    emit("prefill", requests=num_prompts, tokens=num_tokens, tok_per_s=rate, runs=rates, **counted.found())


async def measure_ttft(engine: Engine, prompter: Prompter, num_tokens: int) -> None:
    for _ in range(2):
        await generate(engine, prompter.draw(1, num_tokens), 2)
    times_ms = [(await generate(engine, prompter.draw(1, num_tokens), 1)).first_s * 1000 for _ in range(TTFT_REPEATS)]
    emit("ttft", tokens=num_tokens, ms=statistics.median(times_ms), runs=times_ms)


def throughput_workload(num_requests: int, least: int, most: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths; the draws are those of the header."""
    rng = random.Random(0)
    last_id = min(10_000, vocab_size - 1)
    prompts = [[rng.randint(0, last_id) for _ in range(rng.randint(least, most))] for _ in range(num_requests)]
    return prompts, [rng.randint(least, most) for _ in range(num_requests)]


async def measure_throughput(engine: Engine, args: argparse.Namespace) -> None:
    least, most = args.throughput_lengths
    if 2 * most > engine.model.max_model_len:
        raise MeasureError(f"{2 * most} tokens are more than max-model-len {engine.model.max_model_len}")
    prompts, lengths = throughput_workload(args.throughput_requests, least, most, engine.model.vocab_size)
    warm = min(16, len(prompts))
    await generate(engine, prompts[:warm], [min(8, most)] * warm, temperature=0.6)
    counted = Counted(engine)
    timing = await generate(engine, prompts, lengths, temperature=0.6)
    emit(
        "throughput", requests=len(prompts), out_tok_per_s=timing.num_tokens / timing.total_s, seconds=timing.total_s,
        out_tokens=timing.num_tokens, in_tokens=sum(map(len, prompts)), **counted.found(),
    )  # fmt: skip


# --- profile ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """One thing the device did."""

    name: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def whole_steps(kernels: Sequence[Kernel], num_steps: int) -> tuple[list[Kernel], float, float, int]:
    """The kernels of whole steps, where their window begins and ends, and how many steps it holds.

    Steps are told apart by a kernel that occurs once in each; the first two, which saw the profiler start, are left out.
    Without such a kernel: everything, taken as `num_steps`."""
    counts = Counter(kernel.name for kernel in kernels)
    once = next((k.name for k in kernels if abs(counts[k.name] - num_steps) <= 3 and counts[k.name] > 1), None)
    if once is None:
        return list(kernels), kernels[0].start_us, max(kernel.end_us for kernel in kernels), max(1, num_steps)
    marks = [kernel.start_us for kernel in kernels if kernel.name == once]
    marks = marks[2:] if len(marks) > 4 else marks
    inside = [kernel for kernel in kernels if marks[0] <= kernel.start_us < marks[-1]]
    return inside, marks[0], marks[-1], len(marks) - 1


def breakdown(kernels: Sequence[Kernel], num_steps: int) -> dict[str, Any]:
    """Means over whole steps, microseconds: `kernels` by name (share is of the sum of all kernels), `gaps` by the kernels
    before and after, `busy_us` (the union where kernels overlap) and `idle_us`, which add up to `step_us`."""
    if not kernels:
        raise MeasureError("the profiler saw nothing")
    ordered = sorted(kernels, key=lambda kernel: kernel.start_us)
    inside, begin_us, end_us, steps = whole_steps(ordered, num_steps)
    total_us, counts = defaultdict[str, float](float), Counter(kernel.name for kernel in inside)
    gap_us, gap_counts = defaultdict[tuple[str, str], float](float), Counter[tuple[str, str]]()
    idle_us, reached_us, last = 0.0, begin_us, inside[-1].name
    for kernel in inside:
        total_us[kernel.name] += kernel.duration_us
        if kernel.start_us > reached_us:
            between = (last, kernel.name)
            gap_us[between] += kernel.start_us - reached_us
            gap_counts[between] += 1
            idle_us += kernel.start_us - reached_us
        if kernel.end_us > reached_us:
            reached_us, last = kernel.end_us, kernel.name
    if end_us > reached_us:
        between = (last, inside[0].name)
        gap_us[between] += end_us - reached_us
        gap_counts[between] += 1
        idle_us += end_us - reached_us
    whole_us = sum(total_us.values()) or 1.0
    return {
        "steps": steps,
        "step_us": (end_us - begin_us) / steps,
        "busy_us": (end_us - begin_us - idle_us) / steps,
        "idle_us": idle_us / steps,
        "num_kernels": len(inside) / steps,
        "kernels": [
            {"name": name, "count": counts[name] / steps, "us": us / steps, "share": us / whole_us}
            for name, us in sorted(total_us.items(), key=lambda item: -item[1])
        ],
        "gaps": [
            {"after": pair[0], "before": pair[1], "count": gap_counts[pair] / steps, "us": us / steps}
            for pair, us in sorted(gap_us.items(), key=lambda item: -item[1])[:20]
        ],
    }


def profile_text(found: Mapping[str, Any]) -> str:
    lines = [
        f"decode at batch {found['batch']} on {found['device']}: means of {found['steps']} steps, profiler on",
        f"step {found['step_us']:.1f} us = busy {found['busy_us']:.1f} + idle {found['idle_us']:.1f}; "
        f"{found['num_kernels']:.1f} kernels",
        "",
        f"{'count':>8} {'us/step':>10} {'share':>7}  kernel",
    ]
    lines += [f"{k['count']:8.1f} {k['us']:10.2f} {k['share']:7.1%}  {k['name'][:140]}" for k in found["kernels"]]
    lines += ["", f"{'count':>8} {'us/step':>10}  idle after -> before"]
    lines += [f"{g['count']:8.1f} {g['us']:10.2f}  {g['after'][:60]} -> {g['before'][:60]}" for g in found["gaps"]]
    return "\n".join(lines) + "\n"


class Profiler:
    """torch.profiler around part of a run. On CUDA: kernels and copies of every stream; on a CPU: the outermost operators
    of all threads."""

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

    def stop(self) -> list[Kernel]:
        self._profile.stop()
        wanted = "CUDA" if self._cuda else "CPU"
        return [
            Kernel(event.name, event.time_range.start, event.time_range.elapsed_us())
            for event in self._profile.events() or ()
            if event.device_type.name == wanted and (self._cuda or event.cpu_parent is None)
            and not getattr(event, "is_user_annotation", False)
        ]  # fmt: skip


async def measure_profile(engine: Engine, prompter: Prompter, batch: int, args: argparse.Namespace) -> None:
    model = engine.model
    length = min(200, model.max_model_len - args.prompt_tokens)
    check_room(engine, batch, args.prompt_tokens + length)
    profiler = Profiler(model.device.startswith("cuda"))
    tokens, begun = [0] * batch, None
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
    found = {"batch": batch, "device": device_facts(model.device)["device_name"]}
    found |= breakdown(kernels, (sum(tokens) - begun) // batch)
    args.profile.mkdir(parents=True, exist_ok=True)
    path = args.profile / f"decode-{batch}"
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".txt").write_text(profile_text(found))
    emit("profile", batch=batch, file=str(path.with_suffix(".txt")), **{
        key: found[key] for key in ("steps", "step_us", "busy_us", "idle_us", "num_kernels")
    })  # fmt: skip


# --- start to end -------------------------------------------------------------------------------------------------


def device_facts(device: str) -> dict[str, str]:
    import torch

    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{len(os.sched_getaffinity(0))} CPU cores"
    facts = {"device": device, "device_name": name, "torch": torch.__version__}
    with contextlib.suppress(PackageNotFoundError):
        facts["triton"] = version("triton")
    return facts


def phases_of(reports: Sequence[tuple[float, str]], ready_s: float) -> dict[str, float]:
    """Seconds from the first report of each phase to that of the next, the last one until ready."""
    firsts: dict[str, float] = {}
    for moment_s, phase in reports:
        firsts.setdefault(phase, moment_s)
    ends = [*list(firsts.values())[1:], ready_s]
    return {phase: round(end - begin, 4) for (phase, begin), end in zip(firsts.items(), ends, strict=True)}


async def start(args: argparse.Namespace) -> Engine:
    age_s = process_age_s()
    from runtime.start import start_engine
    from runtime.weights.fetch import resolve

    reports: list[tuple[float, str]] = []

    def note(progress: LoadProgress) -> None:
        reports.append((time.perf_counter(), progress.phase))

    files = resolve(args.model, None, note, load_format="dummy")
    config = engine_config(vars(args), files.config)
    begun_s = time.perf_counter()
    engine = await start_engine(config, files, note)
    ready_s = time.perf_counter()
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
    """The number of figures that could not be taken."""
    engine = await start(args)
    prompter, counted = Prompter(engine.model.vocab_size), Counted(engine)
    jobs: list[Job] = [
        *(("decode", {"batch": batch}, measure_decode(engine, prompter, batch, args)) for batch in args.batch),
        *(("prefill", {"requests": p[0], "tokens": p[1]}, measure_prefill(engine, prompter, *p)) for p in args.prefill),
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
    """How many of them could not be done; the reason is their line."""
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
