"""Measurements: decode steps, prefill, time to first token, throughput. Each prints one JSON line without comparing it."""

from __future__ import annotations

import argparse
import json
import statistics
from typing import TYPE_CHECKING, Any

from loadtests.engine.counted import Counted, num_preemptions
from loadtests.engine.workloads import (
    MeasureError,
    Prompter,
    Timing,
    decode_together,
    generate,
    pool,
    throughput_workload,
)

if TYPE_CHECKING:
    from runtime.engine import Engine

PREFILL_REPEATS, TTFT_REPEATS, POOL_REPEATS = 3, 10, 5


def emit(figure: str, **values: Any) -> None:
    """Print a figure with its values as one line of JSON, without buffering."""
    print(json.dumps({"figure": figure, **values}), flush=True)


def check_room(engine: Engine, batch: int, num_tokens: int) -> None:
    """Raise MeasureError if `batch` exceeds the maximum rows, or `num_tokens` the maximum length."""
    model = engine.model
    if batch > model.max_num_seqs:
        raise MeasureError(f"a batch of {batch} is more than max-num-seqs {model.max_num_seqs}")
    if num_tokens > model.max_model_len:
        raise MeasureError(f"{num_tokens} tokens are more than max-model-len {model.max_model_len}")


def check_together(batch: int, timing: Timing, preempted: bool) -> None:
    """Raise MeasureError if requests were preempted or did not decode together, since the timing would measure something else."""
    if preempted or not timing.together:
        raise MeasureError(
            f"a batch of {batch} did not decode together: too few KV blocks (kv-cache-bytes), or prompt tokens a step"
        )


async def measure_decode(engine: Engine, prompter: Prompter, batch: int, args: argparse.Namespace) -> None:
    prompt, steps = args.prompt_tokens, args.decode_tokens
    check_room(engine, batch, prompt + steps + 1)
    await generate(engine, prompter.draw(batch, prompt), min(8, steps + 1))
    counted, preemptions, step_ms = Counted(engine), num_preemptions(engine), []
    for _ in range(args.repeat):
        one = await generate(engine, prompter.draw(batch, prompt), 1)
        many = await generate(engine, prompter.draw(batch, prompt), steps + 1)
        check_together(batch, many, num_preemptions(engine) > preemptions)
        step_ms.append((many.total_s - one.total_s) * 1000 / steps)
    emit("decode", batch=batch, ms=statistics.median(step_ms), runs=step_ms, **counted.found())


async def measure_steps(engine: Engine, prompter: Prompter, batch: int, args: argparse.Namespace) -> None:
    """Measure the time of steps with `batch` rows, and the tokens they produce, which differ with speculative decoding. In a
    warm-up run, speculative decoding measures its costs."""
    prompt, num_tokens = args.prompt_tokens, args.decode_tokens
    check_room(engine, batch, prompt + num_tokens)
    runs, preemptions = [], num_preemptions(engine)
    for _ in range(args.repeat + 1):
        runs.append(await decode_together(engine, prompter.draw(batch, prompt), num_tokens))
        if num_preemptions(engine) > preemptions:
            raise MeasureError(f"a batch of {batch} did not decode together: too few KV blocks (kv-cache-bytes)")
    step_ms = [run.seconds * 1000 / run.num_steps for run in runs[1:]]
    rates = [run.num_tokens / run.seconds for run in runs[1:]]
    emit(
        "steps", batch=batch, ms=statistics.median(step_ms), tok_per_s=statistics.median(rates), runs=step_ms,
        tokens_a_step=sum(run.num_tokens for run in runs[1:]) / sum(run.num_steps for run in runs[1:]) / batch,
    )  # fmt: skip


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


async def measure_pool(engine: Engine, prompter: Prompter, num_texts: int, num_tokens: int) -> None:
    if num_tokens > engine.model.max_model_len:
        raise MeasureError(f"{num_tokens} tokens are more than max-model-len {engine.model.max_model_len}")
    await pool(engine, prompter.draw(num_texts, num_tokens))
    counted = Counted(engine)
    runs_ms = [1000 * await pool(engine, prompter.draw(num_texts, num_tokens)) for _ in range(POOL_REPEATS)]
    ms = statistics.median(runs_ms)
    rate = num_texts * num_tokens / ms * 1000
    emit("pool", texts=num_texts, tokens=num_tokens, tok_per_s=rate, ms=ms, runs=runs_ms, **counted.found())


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
