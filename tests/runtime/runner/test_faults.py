"""What a step's errors mean, by lane; and a worker thread whose work fails, hangs, or that ends itself."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading

import pytest
import torch

from runtime.api import SamplingParams
from runtime.batch import SAMPLE, RowBinding, ScheduledBatch, ScheduledRow
from runtime.fault import Fault, RowFailed, WorkerGone
from runtime.kv.block_table import NewBlocks
from runtime.platform.cuda_lane import cuda_fault
from runtime.platform.worker_lane import WorkerLane
from runtime.runner.worker import Worker
from tests.runtime.runner.runners import LANES, Successor, make_runner


class Panic(BaseException):
    """As a compiled library throws it: no Exception."""


@pytest.mark.parametrize("error", [ValueError("bad"), Panic("gone wrong"), SystemExit(3), StopIteration()])
async def test_whatever_work_raises_is_its_own_and_the_thread_goes_on(error):
    worker = Worker()

    def fail() -> None:
        raise error

    with pytest.raises(Exception, match=type(error).__name__ if not isinstance(error, ValueError) else "bad"):
        await worker.run(fail)
    assert await worker.run(lambda: 7) == 7
    assert await worker.close()


async def test_what_waits_behind_a_first_part_that_panics_is_told():
    lane = WorkerLane(Worker())

    def panic() -> None:
        raise Panic("gone wrong")

    part = lane.begin(panic)
    launched = lane.finish(lambda: part.value(), part)
    with pytest.raises(RuntimeError, match="Panic: gone wrong"):
        await launched.done.wait()
    assert await lane.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_ends_tells_who_waits_and_who_comes():
    worker = Worker()
    await worker.run(lambda: None)
    # Raised in that thread between two pieces of work, where nothing catches it.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker._thread.ident), ctypes.py_object(SystemExit))
    waiting = []
    with contextlib.suppress(WorkerGone):
        waiting += [worker.submit(lambda: None) for _ in range(4)]
    worker._thread.join()
    ends = await asyncio.gather(*(event.wait() for event in waiting), return_exceptions=True)
    assert all(isinstance(end, WorkerGone) for end in ends[1:])
    assert not ends or isinstance(ends[0], WorkerGone | None)  # the first may have been computed
    with pytest.raises(WorkerGone):
        worker.submit(lambda: None)
    assert WorkerLane(worker).fault(WorkerGone()) is Fault.LOST
    assert await worker.close()


async def test_closing_does_not_wait_for_work_that_hangs():
    worker, hang = Worker(), threading.Event()
    worker.submit(lambda: hang.wait() and None)
    assert not await worker.close(limit_s=0)
    hang.set()
    worker._thread.join()


def row_of(row: int, number: int, **params) -> ScheduledRow:
    binding = RowBinding(SamplingParams(max_tokens=4, temperature=0.0, **params), 0, (5, 6), (), num_computed=0)
    return ScheduledRow(number, row, 0, 2, (5, 6), new_blocks=(NewBlocks(0, 0, (row,)),), work=SAMPLE, binding=binding)


@pytest.mark.parametrize("lane", LANES)
async def test_a_row_that_cannot_be_bound_is_named_and_the_runner_serves_on(lane, monkeypatch):
    runner = make_runner(lane, Successor(), monkeypatch)
    too_many = dict.fromkeys(range(5000), 1.0)
    batch = ScheduledBatch((row_of(0, 11), row_of(1, 12, logit_bias=too_many)), 4, 0)
    with pytest.raises(RowFailed) as caught:
        await runner.launch(batch).result()
    assert caught.value.number == 12
    assert (await runner.launch(ScheduledBatch((row_of(0, 11),), 2, 0)).result()).tokens == [[7]]
    await runner.close()


@pytest.mark.parametrize("lane", LANES)
def test_a_lack_of_memory_is_known_however_it_is_said(lane, monkeypatch):
    fault = make_runner(lane, Successor(), monkeypatch).fault
    assert fault(MemoryError()) is Fault.MEMORY
    assert fault(ValueError("bad")) is fault(RuntimeError("bad")) is Fault.STEP
    assert fault(WorkerGone()) is Fault.LOST
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(1 << 60)
    assert fault(torchs.value) is Fault.MEMORY


def accelerator_error(code: int) -> Exception:
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code  # as torch sets it
    return error


@pytest.mark.parametrize("code", [700, 710, 715, 719, 214])
def test_an_error_that_poisons_the_context_is_the_end_of_it(code):
    assert cuda_fault(accelerator_error(code)) is Fault.LOST


def test_a_lack_of_memory_on_a_gpu_does_not():
    assert cuda_fault(torch.OutOfMemoryError("CUDA out of memory")) is Fault.MEMORY


def test_an_error_that_says_nothing_is_known_by_asking_the_device(monkeypatch):
    """Triton's errors are plain RuntimeErrors."""
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    answers = {"mem_get_info": lambda: (1, 2)}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: answers["mem_get_info"]())
    assert cuda_fault(error) is Fault.STEP

    def poisoned():
        raise accelerator_error(700)

    answers["mem_get_info"] = poisoned
    assert cuda_fault(error) is Fault.LOST
