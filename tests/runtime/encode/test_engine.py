"""An engine beside whose steps encoders run: others' tokens come meanwhile, and what fails ends whom it has to."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from runtime.api import FinishReason, MediaItem, Request, SamplingParams
from runtime.encode.scheduling import EncoderLimits, EncoderScheduling
from runtime.fault import Fault, RowFailed
from tests.fake_runner import FakeRunner, model_info
from tests.features import exchange
from tests.runtime.test_engine import engine_on, read, request, value


class Seeing(FakeRunner):
    """Its encoders are done when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.encoding: list[asyncio.Future[None]] = []
        self.has_begun = asyncio.Event()

    def encode(self, batch):
        begun = [asyncio.get_running_loop().create_future() for _ in batch.encoder_work]
        self.encoding += begun
        self.has_begun.set()
        return begun

    def fault(self, error):
        return Fault.LOST if "illegal" in str(error) else super().fault(error)


def seeing_engine(runner: Seeing):
    return engine_on(runner, model=model_info(modalities=frozenset({"image"})))


def picture(name: str = "p") -> Request:
    item = MediaItem("image", b"digest", np.array([1, 2], np.int32), {})
    return Request(name, [1, 5, 5, 2], SamplingParams(2), media=(item,))


async def begun(engine, runner: Seeing, *requests: Request):
    exchange(engine._scheduler, EncoderScheduling, EncoderScheduling(EncoderLimits(16, 16, 64)))
    streams = [asyncio.ensure_future(read(engine.submit([each]))) for each in requests]
    await runner.has_begun.wait()
    return streams


async def test_another_stream_comes_to_its_end_while_a_picture_is_encoded():
    runner = Seeing()
    async with seeing_engine(runner) as engine:
        (waiting,) = await begun(engine, runner, picture())
        assert await read(engine.submit([request()])) == {0: ([3, 4, 5, 6], FinishReason.LENGTH)}
        assert not waiting.done()
        runner.encoding[0].set_result(None)
        assert await waiting == {0: ([4, 5], FinishReason.LENGTH)}


async def test_a_picture_that_cannot_be_encoded_ends_its_request_and_is_tried_for_another():
    runner = Seeing()
    async with seeing_engine(runner) as engine:
        first, second = await begun(engine, runner, picture("a"), picture("b"))
        runner.has_begun.clear()
        (number,) = [n for n, sink in engine._requests.by_number.items() if sink.sequence.request.id == "a"]
        runner.encoding[0].set_exception(RowFailed(number))
        assert await first == {0: ([], FinishReason.ERROR)}
        await runner.has_begun.wait()
        runner.encoding[1].set_result(None)
        assert await second == {0: ([4, 5], FinishReason.LENGTH)}


async def test_an_aborted_request_leaves_its_picture_to_whoever_brings_it_again():
    runner = Seeing()
    async with seeing_engine(runner) as engine:
        (first,) = await begun(engine, runner, picture("a"))
        assert engine.abort(["a"]) == 1
        assert (await first)[0][1] is FinishReason.ABORT
        second = asyncio.ensure_future(read(engine.submit([picture("b")])))
        runner.encoding[0].set_result(None)
        assert await second == {0: ([4, 5], FinishReason.LENGTH)}
        assert len(runner.encoding) == 1


async def test_metrics_tell_what_was_encoded_and_found():
    runner = Seeing()
    async with seeing_engine(runner) as engine:
        first, second = await begun(engine, runner, picture("a"), picture("b"))
        runner.encoding[0].set_result(None)
        await asyncio.gather(first, second)
        modality = ("modality", "image")
        assert value(engine, "encoder_items", modality) == 1
        assert value(engine, "encoder_tokens", modality) == 2
        assert (value(engine, "mm_cache_queries"), value(engine, "mm_cache_hits")) == (2, 1)
        assert value(engine, "encoder_cache_usage_perc") == 2 / 16
        assert sum(value(engine, "encoder_time_seconds").counts) == 1


async def test_a_model_of_text_tells_nothing_of_encoders():
    async with engine_on(FakeRunner()) as engine:
        assert not [metric for metric in engine.metrics() if "encoder" in metric.name or "mm_" in metric.name]


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_device_that_is_lost_beside_a_step_ends_the_engine(is_alone):
    runner = Seeing()
    async with seeing_engine(runner) as engine:
        (waiting,) = await begun(engine, runner, picture())
        if is_alone:
            engine.abort(["p"])
        runner.encoding[0].set_exception(RuntimeError("an illegal memory access"))
        assert "cannot compute any more" in await engine.death()
        assert (await waiting)[0][1] is (FinishReason.ABORT if is_alone else FinishReason.ERROR)
