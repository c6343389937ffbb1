"""What a long prompt costs the event loop: `python -m tests.benches.long_prompt [--tokens N]`, by hand only.

The scheduler's part and the engine's, without a device: checking and hashing the ids where the loop must do it and on a thread,
submitting, its steps, its end, a step that it waits through at the head of the line, and what a cached one costs. Milliseconds, the
least of several; told beside the thread's work is how long the loop was kept from running meanwhile, at most."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable

from runtime.api import FinishReason, PreparedPrompt, Request, SamplingParams
from runtime.batch import ScheduledBatch
from runtime.engine.prompt import check_ids, prepare
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.policy.fairness import POLICIES
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence

VOCAB, BLOCK, STEP = 151_936, 16, 8192
REPEATS = 7


def ms(work: Callable[[], object]) -> float:
    """Of the processor, whoever else wants it."""
    began = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - began)


def scheduler_of(num_blocks: int) -> Scheduler:
    return Scheduler(
        SchedulerLimits(64, STEP, frozenset()), BlockPool(num_blocks), PrefixCache(BLOCK), POLICIES["fcfs"]()
    )


def sequence(number: int, ids: list[int], prepared: PreparedPrompt | None) -> Sequence:
    request = Request(str(number), ids, SamplingParams(8), prepared=prepared)
    return Sequence(request, number=number, max_model_len=len(ids) + 64, seed=0)


def to_the_end(scheduler: Scheduler) -> None:
    while (batch := scheduler.schedule()) is not None:
        scheduler.settle(batch, [[5] for _ in batch.sampling_rows])


def steps_of(scheduler: Scheduler, num: int) -> list[ScheduledBatch]:
    return [batch for _ in range(num) if (batch := scheduler.schedule()) is not None]


def one(ids: list[int], *, ahead: bool) -> dict[str, float]:
    """`ahead`: the prompt comes prepared."""
    found = {}
    num_blocks = len(ids) // BLOCK + 64
    scheduler = scheduler_of(num_blocks)
    prepared = prepare(scheduler.blocks.cache, VOCAB, ids, None) if ahead else None
    found["check the ids"] = 0.0 if ahead else ms(lambda: check_ids(ids, VOCAB))
    made: list[Sequence] = []
    found["make the sequence"] = ms(lambda: made.append(sequence(1, ids, prepared)))
    scheduler.add(made[0])
    found["first step"] = ms(scheduler.schedule)
    found["second step"] = ms(scheduler.schedule)
    batches: list[ScheduledBatch] = []
    found["all other steps"] = ms(lambda: batches.extend(steps_of(scheduler, len(ids) // STEP - 2)))
    found["its end"] = ms(lambda: scheduler.finish(made[0], FinishReason.STOP))
    cached = scheduler_of(num_blocks)
    prepared = prepare(cached.cache, VOCAB, ids, None) if ahead else None
    cached.add(sequence(1, ids, prepared))
    to_the_end(cached)
    cached.add(sequence(2, ids, prepared))
    found["first step, cached"] = ms(cached.schedule)
    waits = scheduler_of(num_blocks)
    prepared = prepare(waits.cache, VOCAB, ids, None) if ahead else None
    waits.add(sequence(1, ids, prepared))
    to_the_end(waits)
    waits.add(sequence(2, [7] * (64 * BLOCK), None))
    waits.schedule()
    waits.add(sequence(3, [*ids, *ids[: 128 * BLOCK]], None))
    waits.schedule()
    waits.schedule()
    found["a step at the head of the line"] = ms(waits.schedule)
    return found


async def kept_waiting(work: Callable[[], object]) -> tuple[float, float]:
    """How long `work` takes on a thread, and the longest that the loop could not run meanwhile."""
    began = last = time.perf_counter()
    longest = 0.0
    done = asyncio.get_running_loop().run_in_executor(None, work)
    while not done.done():
        await asyncio.sleep(0.0002)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return 1e3 * (time.perf_counter() - began), 1e3 * longest


def main(args: argparse.Namespace) -> None:
    ids = random.Random(1).choices(range(VOCAB), k=args.tokens)
    for ahead in (False, True):
        runs = [one(ids, ahead=ahead) for _ in range(REPEATS)]
        print(f"{args.tokens} tokens, {'prepared on a thread' if ahead else 'as they come'}:")
        for name in runs[0]:
            print(f"  {name:<34}{min(run[name] for run in runs):8.2f} ms")
    cache = PrefixCache(BLOCK)
    found = [asyncio.run(kept_waiting(lambda: prepare(cache, VOCAB, ids, None))) for _ in range(REPEATS)]
    took, longest = min(found, key=lambda pair: pair[1])
    print(f"prepare, on a thread: {took:.1f} ms, of which the loop was kept waiting {longest:.2f} ms at a time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    main(parser.parse_args())
