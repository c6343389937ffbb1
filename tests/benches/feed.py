"""What dashboard and inspector cost beside 256 streams: `python -m tests.benches.feed`.

The real engine over a runner that computes nothing, with a reader for every stream: the CPU time of its steps, and that of the
snapshot which the feed makes of it once a second for all who watch. A second has as many steps as 256 streams of a small model take
on an H200. HTTP and text come on top of the steps and not of the snapshot, so a server's share is smaller than what is printed."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from runtime.api import Request, SamplingParams
from server.models.dashboard import Snapshots
from server.models.defaults import sampling_defaults
from server.models.lifecycle import Lifecycle
from tests.fake_runner import FakeRunner, make_engine, model_info
from tests.server.tiny import chatml, loaded_model, tiny_tokenizer

STREAMS = 256
STEPS_PER_S = 170  # at 5.8 ms, a step of 256 streams
BLOCKS_OF_A_STREAM = 400  # of four tokens

Work = Callable[[], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a second of steps and of one snapshot, in whatever `measure` counts; `num_bytes` of the snapshot."""

    steps: float
    snapshot: float
    num_bytes: int

    @property
    def share(self) -> float:
        return self.snapshot / self.steps


async def costs(
    measure: Callable[[Work], Awaitable[float]], seconds: int, streams: int = STREAMS, steps_per_s: int = STEPS_PER_S
) -> list[Cost]:
    """Of so many seconds, one after the other."""
    runner = FakeRunner()
    engine = make_engine(
        runner,
        num_blocks=BLOCKS_OF_A_STREAM * streams,
        max_num_seqs=streams,
        budget=8192,
        model=model_info(max_model_len=4 * BLOCKS_OF_A_STREAM),
    )
    tokenizer, lifecycle = tiny_tokenizer(), Lifecycle()
    lifecycle.ready(loaded_model(engine, tokenizer, chatml(tokenizer), sampling_defaults(), ("fake",)))
    snapshots = Snapshots(lifecycle, lambda: streams)

    async def read(number: int) -> None:
        params = SamplingParams(4 * BLOCKS_OF_A_STREAM - 100, ignore_eos=True)
        async with engine.submit([Request(f"r{number}", [1 + number % 97] * 16, params)]) as stream:
            async for _ in stream:
                pass

    async def a_second() -> None:
        until = len(runner.batches) + steps_per_s
        while len(runner.batches) < until:  # noqa: ASYNC110 (an event of each step would be measured, too)
            await asyncio.sleep(0)

    sizes: list[int] = []

    async def a_snapshot() -> None:
        sizes.append(len(snapshots.next()))

    readers = [asyncio.create_task(read(number)) for number in range(streams)]
    try:
        await a_second()  # prompts, and what is done once
        await a_snapshot()
        found = [Cost(await measure(a_second), await measure(a_snapshot), sizes[-1]) for _ in range(seconds)]
        assert all(not reader.done() for reader in readers), "streams ended before what was measured"
        return found
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await engine.close()


async def cpu_s(work: Work) -> float:
    """Of this thread, which is the loop's and all there is."""
    began = time.thread_time()
    await work()
    return time.thread_time() - began


async def calls(work: Work) -> float:
    """Functions of Python and of C that are called: the same on every machine."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        await work()
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    by_time = asyncio.run(costs(cpu_s, 7))
    steps_s, snapshot_s = (statistics.median(getattr(each, name) for each in by_time) for name in ("steps", "snapshot"))
    print(
        f"{STREAMS} streams: {1e6 * steps_s / STEPS_PER_S:.0f} us of CPU a step, {1e3 * steps_s:.0f} ms in {STEPS_PER_S} of them; "
        f"a snapshot {1e3 * snapshot_s:.2f} ms, {by_time[-1].num_bytes:,} bytes: {100 * snapshot_s:.2f} % of a second, "
        f"{100 * snapshot_s / steps_s:.1f} % of the engine's own CPU"
    )
    (by_calls,) = asyncio.run(costs(calls, 1))
    print(
        f"calls: {by_calls.steps:,.0f} of the steps, {by_calls.snapshot:,.0f} of the snapshot: {100 * by_calls.share:.2f} %"
    )


if __name__ == "__main__":
    main()
