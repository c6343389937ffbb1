"""An engine over several ranks: a step that fails on one of them ends its own requests alone."""

from __future__ import annotations

import asyncio
import re

import pytest

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig
from runtime.models.spec.model import UnsupportedModel
from runtime.parallel.group import Apart
from runtime.parallel.runners import EveryEvent
from runtime.runner.runner import ModelRunner
from runtime.runner.worker import _Job
from runtime.start import plan_engine, start_engine
from runtime.step import WorkerEvent
from tests.fake_runner import LateMasks, Rule
from tests.runtime.parallel.conftest import SIZES, quiet

VOCAB = SIZES["vocab_size"]


def options(**more) -> EngineConfig:
    return EngineConfig(**{"device": "cpu", "num_kv_blocks": 64, "tensor_parallel_size": 2} | more)


async def answer(engine, ids, **params) -> tuple[list[int], list, str | None]:
    """Its ids, log-probabilities, and what error ended it."""
    found, logprobs, error = [], [], None
    request = Request("r", ids, SamplingParams(20, ignore_eos=True, **params))
    async with engine.submit([request]) as stream:
        async for outputs in stream:
            for output in outputs:
                found += output.token_ids
                logprobs += output.logprobs or ()
                error = output.error or error
    return found, logprobs, error


async def test_draws_log_probabilities_and_facts_are_those_of_one_device(files):
    alone = await start_engine(EngineConfig(device="cpu", num_kv_blocks=64), files, quiet)
    ranks = await start_engine(options(), files, quiet)
    try:
        assert ranks.model.num_parameters == alone.model.num_parameters
        for params in ({"temperature": 0.0, "logprobs": 3}, {"temperature": 1.0, "seed": 5, "presence_penalty": 1.0}):
            expected, theirs, _ = await answer(alone, [3, 4, 5], **params)
            found, ours, error = await answer(ranks, [3, 4, 5], **params)
            assert (found, error) == (expected, None)
            assert [[id for id, _ in each.top] for each in ours] == [[id for id, _ in each.top] for each in theirs]
    finally:
        await alone.close()
        await ranks.close()


@pytest.mark.parametrize("late", [False, True])
async def test_constrained_answers_are_those_of_one_device_whenever_their_masks_come(files, late):
    def next_up(ids):
        return {(ids[-1] + step) % VOCAB for step in (3, 4)} if ids else {50, 60}

    answers = []
    for size in (1, 2):
        engine = await start_engine(options(tensor_parallel_size=size), files, quiet)
        makers = LateMasks(engine._scheduler)
        make = makers.rule("r", next_up, VOCAB) if late else lambda: Rule(next_up, VOCAB)
        try:
            others = [asyncio.create_task(answer(engine, [number, 8], temperature=0.0)) for number in range(3)]
            answers.append(await answer(engine, [3, 4, 5], temperature=0.7, seed=3, matchers=(make,)))
            answers.append([await other for other in others])
        finally:
            await engine.close()
    assert answers[:2] == answers[2:]
    assert answers[0][0][0] in {50, 60}
    assert answers[0][2] is None


async def test_a_step_that_fails_on_one_rank_ends_its_requests_and_no_others(files, monkeypatch):
    engine = await start_engine(options(), files, quiet)
    compute, failing = ModelRunner.compute, []

    def on_one_rank(self, step, rows):
        if failing and self is failing[0]:
            failing.pop()
            raise RuntimeError("a kernel failed")
        return compute(self, step, rows)

    monkeypatch.setattr(ModelRunner, "compute", on_one_rank)
    try:
        expected = await answer(engine, [3, 4, 5], temperature=0.0)
        failing.append(engine.loop.runner._runners[1])
        _, _, error = await answer(engine, [6, 7, 8], temperature=0.0)
        assert error is not None
        assert await answer(engine, [3, 4, 5], temperature=0.0) == expected
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("sizes", "where"),
    [
        ({"tensor_parallel_size": 2}, "rank 1 of 2"),
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, "stage 1 of 2"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "rank 1 of 2, stage 1 of 2"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_device_that_has_gone_in_the_midst_of_a_step_is_the_end_and_is_named(files, sizes, where):
    """Others wait for it within a step that it will never compute."""
    engine = await start_engine(options(**sizes), files, quiet)
    runner = engine.loop.runner
    while hasattr(runner, "_runners"):
        runner = runner._runners[-1]
    last, error = runner._lane._worker, None
    async with engine.submit([Request("r", [3, 4], SamplingParams(100, ignore_eos=True))]) as stream:
        async for (output,) in stream:
            last._jobs.put(_Job(lambda: None, None))  # nobody can be told what became of it: its thread ends
            error = output.error or error
    assert error == await engine.death()
    assert re.fullmatch(rf"the device cannot compute any more: (Worker)?Gone \({where}\)", error)
    assert engine.health().hopeless
    await engine.close()


async def test_a_rank_that_cannot_be_loaded_is_what_starting_fails_with(files, monkeypatch):
    from runtime.models import load

    together = load.put_together

    def broken(spec, weights, peers):
        if peers.number == 1:
            raise MemoryError("no room on the second")
        return together(spec, weights, peers)

    monkeypatch.setattr(load, "put_together", broken)
    with pytest.raises(MemoryError, match="no room on the second"):
        await start_engine(options(), files, quiet)


def test_what_is_not_shared_out_is_refused_by_name(files):
    with pytest.raises(UnsupportedModel, match="cannot be cut for 2 devices: it runs through transformers"):
        plan_engine(options(model_impl="transformers"), files, quiet)


def ended(error: Exception | None) -> WorkerEvent:
    future = asyncio.get_running_loop().create_future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return WorkerEvent(future)


async def test_the_error_of_the_rank_that_failed_is_told_not_that_of_those_left_alone():
    for kinds in ((Apart, None, KeyError), (KeyError, Apart, None), (None, KeyError, Apart)):
        events = [ended(None if kind is None else kind("broken")) for kind in kinds]
        with pytest.raises(KeyError) as caught:
            await EveryEvent(events, "rank").wait()
        assert caught.value.__notes__ == [f"rank {kinds.index(KeyError)} of 3"]
    with pytest.raises(Apart):
        await EveryEvent([ended(None), ended(Apart("alone"))], "rank").wait()
    await EveryEvent([ended(None), ended(None)], "rank").wait()


async def test_nobody_waits_for_a_device_that_waits_for_one_that_has_failed():
    never = WorkerEvent(asyncio.get_running_loop().create_future())
    both = EveryEvent([never, ended(KeyError("broken"))], "rank")
    with pytest.raises(KeyError) as caught:
        await EveryEvent([ended(None), both], "stage").wait()
    assert caught.value.__notes__ == ["rank 1 of 2", "stage 1 of 2"]
