"""Encoders run beside steps: a thread of their own computes them, on every lane; what they give, and how they fail."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.api import MediaItem
from runtime.batch import SAMPLE, EncoderWork, RowBinding, ScheduledBatch, ScheduledRow
from runtime.fault import Fault, RowFailed
from tests.runtime.runner.runners import LANES, Successor, make_runner
from tests.runtime.runner.test_other_work import PARAMS


class Encoder:
    """Gives an item's number, once `go` is set; refuses what has none."""

    spec = SimpleNamespace(whole_items=False)

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[list[bytes]] = []
        self.threads: set[int] = set()
        self.error: BaseException | None = None

    def encode(self, items):
        self.threads.add(threading.get_ident())
        self.begun.append([item.digest for item in items])
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        if any("value" not in item.inputs for item in items):
            raise ValueError("nothing to encode")
        return [torch.full((len(item.positions), 1), float(item.inputs["value"])) for item in items]


class Seeing(Successor):
    def __init__(self) -> None:
        self.encoder = Encoder()


def work(number: int, value: int | None = 0) -> EncoderWork:
    inputs = {} if value is None else {"value": np.array(value)}
    key = b"%d" % number
    return EncoderWork(number, key, MediaItem("image", key, np.arange(2, dtype=np.int32), inputs))


def encoding(*works: EncoderWork, drops: tuple[bytes, ...] = ()) -> ScheduledBatch:
    return ScheduledBatch((), 0, 0, encoder_work=works, encoder_drops=drops)


def decode() -> ScheduledBatch:
    row = ScheduledRow(0, 0, 0, 1, (7,), work=SAMPLE, binding=RowBinding(PARAMS, 0, (7,), ()))
    return ScheduledBatch((row,), 1, 0)


@pytest.mark.parametrize("lane", LANES)
async def test_a_step_ends_while_an_item_is_encoded(lane, monkeypatch):
    model = Seeing()
    runner = make_runner(lane, model, monkeypatch)
    (done,) = runner.encode(encoding(work(1)))
    result = await runner.launch(decode()).result()
    assert result.tokens == [[8]]
    assert not done.done()
    model.encoder.go.set()
    await done
    assert threading.get_ident() not in model.encoder.threads
    await runner.close()


@pytest.mark.parametrize("lane", LANES)
async def test_of_items_together_only_the_one_that_cannot_be_encoded_fails(lane, monkeypatch):
    model = Seeing()
    model.encoder.go.set()
    runner = make_runner(lane, model, monkeypatch)
    good, bad = runner.encode(encoding(work(1, 4), work(2, None)))
    await good
    with pytest.raises(RowFailed) as failure:
        await bad
    assert failure.value.number == 2
    assert model.encoder.begun == [[b"1", b"2"], [b"1"], [b"2"]]
    await runner.close()


async def test_what_is_dropped_before_its_turn_is_not_encoded(monkeypatch):
    model = Seeing()
    runner = make_runner("worker", model, monkeypatch)
    first, second = *runner.encode(encoding(work(1))), *runner.encode(encoding(work(2)))
    (third,) = runner.encode(encoding(work(3), drops=(b"2",)))
    model.encoder.go.set()
    for done in (first, second, third):
        await done
    assert model.encoder.begun == [[b"1"], [b"3"]]
    await runner.close()


async def test_a_lost_device_is_nobodys_fault(monkeypatch):
    model = Seeing()
    model.encoder.go.set()
    runner = make_runner("worker", model, monkeypatch)
    model.encoder.error = RuntimeError("poisoned")
    monkeypatch.setattr(runner._lane, "fault_beside", lambda error: Fault.LOST)
    for done in runner.encode(encoding(work(1), work(2))):
        with pytest.raises(RuntimeError, match="poisoned"):
            await done
    await runner.close()
