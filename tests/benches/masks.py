"""What rows with masks cost their neighbours: `python -m tests.benches.masks [--rows N] [--forward-ms MS ...]`, by hand only.

The real engine over a simulated device: it takes a given time for a forward pass and 50 us for a draw, one after another, and the
host 100 and 80 us to launch them. Told is the time between two tokens of a row without a mask, beside none, one and almost
nothing but masked rows; and beside one whose every mask takes longer than the forward pass. Masks of 152k tokens."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from queue import SimpleQueue
from threading import Thread

from runtime.api import Request, SamplingParams
from runtime.batch import ScheduledBatch
from runtime.constrain.masks import mask_of, num_words
from runtime.fault import Fault
from runtime.step import ForwardOutput, RowMasks, Step, StepResult, WorkerEvent
from tests.fake_runner import make_engine, model_info

VOCAB = 151_936
MASK = mask_of(range(0, VOCAB, 3), num_words(VOCAB)).tobytes()
STEPS, WARM_UP = 150, 20
DRAW_S, LAUNCH_S, LAUNCH_DRAW_S = 50e-6, 100e-6, 80e-6


class Device:
    """A runner."""

    def __init__(self, forward_s: float) -> None:
        self._forward_s = forward_s
        self._loop = asyncio.get_running_loop()
        self._free_s = 0.0
        self._ends: SimpleQueue[tuple[float, asyncio.Future[None]] | None] = SimpleQueue()
        Thread(target=self._pass_time, daemon=True).start()

    def launch(self, batch: ScheduledBatch) -> Step:
        self._enqueue(self._forward_s + DRAW_S, LAUNCH_S)
        return self._step(batch)

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        self._enqueue(self._forward_s + DRAW_S, LAUNCH_S)
        return self._unsampled(batch)

    def _unsampled(self, batch: ScheduledBatch) -> ForwardOutput:
        def sample(part: ScheduledBatch, masks: RowMasks) -> Step:
            self._enqueue(DRAW_S, LAUNCH_DRAW_S)
            return self._step(part)

        return ForwardOutput(batch, sample, self._unsampled, self._event)

    def _step(self, batch: ScheduledBatch) -> Step:
        return Step(batch, self._event(), lambda: StepResult([[0]] * len(batch.sampling_rows)))

    def _enqueue(self, takes_s: float, host_s: float) -> None:
        launched_s = time.perf_counter() + host_s
        while time.perf_counter() < launched_s:
            pass
        self._free_s = max(launched_s, self._free_s) + takes_s

    def _event(self) -> WorkerEvent:
        future = self._loop.create_future()
        self._ends.put((self._free_s, future))
        return WorkerEvent(future)

    def _pass_time(self) -> None:
        while (entry := self._ends.get()) is not None:
            end_s, future = entry
            time.sleep(max(0.0, end_s - time.perf_counter()))
            self._loop.call_soon_threadsafe(future.set_result, None)

    def fault(self, error: BaseException) -> Fault:
        return Fault.STEP

    async def close(self) -> bool:
        self._ends.put(None)
        return True


class Constant:
    """A matcher that takes its time."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s

    def allowed(self) -> bytes:
        if self._takes_s:
            time.sleep(self._takes_s)
        return MASK

    def accept(self, token_id: int) -> None:
        pass


async def gaps(forward_s: float, rows: int, masked: int, mask_s: float = 0.0) -> list[float]:
    """Milliseconds between the tokens of a row without a mask."""
    model = model_info(vocab_size=VOCAB, max_model_len=2048)
    engine = make_engine(Device(forward_s), num_blocks=64 * rows, max_num_seqs=rows, budget=2048, model=model)
    usual = SamplingParams(STEPS)
    held = SamplingParams(STEPS, matchers=(lambda: Constant(mask_s),))
    token_times_s = []
    async with engine.submit(
        [Request(str(n), [n], held if n >= rows - masked else usual) for n in range(rows)]
    ) as stream:
        async for outputs in stream:
            token_times_s += [time.perf_counter() for output in outputs if output.index == 0 for _ in output.token_ids]
            if len(token_times_s) == STEPS:
                break
    await engine.close()
    return [
        (after - before) * 1e3
        for before, after in zip(token_times_s[WARM_UP:], token_times_s[WARM_UP + 1 :], strict=False)
    ]


async def main(args: argparse.Namespace) -> None:
    rows = args.rows
    kinds = [(0, 0.0), (1, 0.0), (rows // 2, 0.0), (rows - 1, 0.0), (1, 0.02), (1, 0.2)]
    print(f"{'forward':>10}{'masked rows':>14}{'a mask':>10}{'median':>12}{'mean':>12}")
    for forward_ms in args.forward_ms:
        for masked, mask_s in kinds:
            found = await gaps(forward_ms / 1e3, rows, masked, mask_s)
            middle, mean = statistics.median(found), statistics.mean(found)
            mask_time = f"{mask_s * 1e3:g} ms" if mask_s else "no time"
            print(
                f"{forward_ms:>7g} ms{masked:>8} of {rows}{mask_time:>11}{middle:>9.2f} ms{mean:>9.2f} ms", flush=True
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--forward-ms", type=float, nargs="+", default=[1.0, 5.0])
    asyncio.run(main(parser.parse_args()))
