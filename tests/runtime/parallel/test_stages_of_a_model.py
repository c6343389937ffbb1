"""An engine over several stages, on a CPU: its answers are one device's, steps are under way in all of them at once, and one that
fails ends its own requests alone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig, PlanError
from runtime.models.decoder import Decoder
from runtime.models.spec.model import UnsupportedModel
from runtime.runner.runner import ModelRunner
from runtime.start import plan_engine, start_engine
from tests.fake_runner import LateMasks, Rule
from tests.runtime.parallel.conftest import SIZES, quiet

VOCAB = SIZES["vocab_size"]


def options(**more) -> EngineConfig:
    return EngineConfig(**{"device": "cpu", "num_kv_blocks": 64, "pipeline_parallel_size": 2} | more)


async def answer(engine, ids, num=20, **params) -> tuple[list[int], list, list, str | None]:
    """Its ids, log-probabilities, those of the prompt, and what error ended it."""
    found, logprobs, of_prompt, error = [], [], [], None
    request = Request("r", ids, SamplingParams(num, ignore_eos=True, **params))
    async with engine.submit([request]) as stream:
        async for outputs in stream:
            for output in outputs:
                found += output.token_ids
                logprobs += output.logprobs or ()
                of_prompt += output.prompt_logprobs or ()
                error = output.error or error
    return found, logprobs, of_prompt, error


@pytest.fixture
async def both(files):
    alone = await start_engine(options(pipeline_parallel_size=1), files, quiet)
    stages = await start_engine(options(), files, quiet)
    yield alone, stages
    await alone.close()
    await stages.close()


async def test_draws_log_probabilities_and_facts_are_those_of_one_device(both):
    alone, stages = both
    assert stages.model.num_parameters == alone.model.num_parameters
    assert stages.model.weights_bytes == alone.model.weights_bytes
    assert stages.model.generates
    for params in (
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    ):
        expected, theirs, their_prompt, _ = await answer(alone, [3, 4, 5, 6], **params)
        found, ours, our_prompt, error = await answer(stages, [3, 4, 5, 6], **params)
        assert (found, error) == (expected, None)
        for mine, other in ((ours, theirs), (our_prompt, their_prompt)):
            assert [[id for id, _ in each.top] for each in mine] == [[id for id, _ in each.top] for each in other]


@pytest.mark.parametrize("late", [False, True])
async def test_constrained_answers_are_those_of_one_device_whenever_their_masks_come(both, late):
    def next_up(ids):
        return {(ids[-1] + step) % VOCAB for step in (3, 4)} if ids else {50, 60}

    answers = []
    for engine in both:
        makers = LateMasks(engine._scheduler)
        make = makers.rule("r", next_up, VOCAB) if late else lambda: Rule(next_up, VOCAB)
        others = [asyncio.create_task(answer(engine, [number, 8], temperature=0.0)) for number in range(3)]
        answers.append(await answer(engine, [3, 4, 5], temperature=0.7, seed=3, matchers=(make,)))
        answers.append([await other for other in others])
    assert answers[:2] == answers[2:]
    assert answers[0][0][0] in {50, 60}
    assert answers[0][3] is None


async def test_stages_compute_different_steps_at_the_same_time(files, monkeypatch):
    """In the midst of a step the second stage waits for the first to begin the next one, which is the other sequence's."""
    engine = await start_engine(options(), files, quiet)
    forward, entered, changed, met = Decoder.forward, [0, 0], threading.Condition(), []

    def meeting(self, step):
        number = self.spec.stage_of.number
        with changed:
            entered[number] += 1
            changed.notify_all()
            if number == 1 and entered[1] == 6:
                met.append(changed.wait_for(lambda: entered[0] > 6, timeout=20))
        return forward(self, step)

    monkeypatch.setattr(Decoder, "forward", meeting)
    requests = [Request(str(n), [n, 8], SamplingParams(12, temperature=0.0, ignore_eos=True)) for n in (3, 4)]
    try:
        async with engine.submit(requests) as stream:
            async for _ in stream:
                pass
    finally:
        await engine.close()
    assert met == [True]


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_step_that_fails_in_one_stage_ends_its_requests_and_no_others(files, monkeypatch, stage):
    engine = await start_engine(options(), files, quiet)
    compute, failing = ModelRunner.compute, []

    def in_one_stage(self, step, rows, *more, **named):
        if failing and self is failing[0]:
            failing.pop()
            raise RuntimeError("a kernel failed")
        return compute(self, step, rows, *more, **named)

    monkeypatch.setattr(ModelRunner, "compute", in_one_stage)
    try:
        for params in ({}, {"matchers": (lambda: Rule(lambda ids: {5, 6, 7}, VOCAB),)}):
            expected = await answer(engine, [3, 4, 5], temperature=0.0, **params)
            assert expected[3] is None
            failing.append(engine.loop.runner._runners[stage])
            *_, error = await answer(engine, [6, 7, 8], temperature=0.0, **params)
            assert error is not None
            assert not failing
            assert await answer(engine, [3, 4, 5], temperature=0.0, **params) == expected
    finally:
        await engine.close()


async def test_a_stage_that_cannot_be_loaded_is_what_starting_fails_with(files, monkeypatch):
    build = Decoder.build.__func__

    def broken(cls, spec, *more, **named):
        if spec.stage_of.number == 1:
            raise MemoryError("no room on the second")
        return build(cls, spec, *more, **named)

    monkeypatch.setattr(Decoder, "build", classmethod(broken))
    with pytest.raises(MemoryError, match="no room on the second"):
        await start_engine(options(), files, quiet)


def test_what_is_not_cut_into_stages_is_refused_by_name(files):
    for more, message in (
        ({"enable_lora": True}, "--enable-lora is not supported with --pipeline-parallel-size"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds is not supported with --pipeline-parallel-size"),
    ):
        with pytest.raises(PlanError, match=message):
            plan_engine(options(**more), files, quiet)
    for more, message in (
        ({"model_impl": "transformers"}, "cannot be cut for 2 devices: it runs through transformers"),
        ({"pipeline_parallel_size": 3}, "has 2 layers, too few for 3 stages"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            plan_engine(options(**more), files, quiet)


async def test_each_stage_has_its_layers(tmp_path, files):
    engine = await start_engine(options(), files, quiet)
    try:
        layers = [[name for name, _ in each._model.spec.named_layers()] for each in engine.loop.runner._runners]
        assert layers == [["model.layers.0"], ["model.layers.1"]]
    finally:
        await engine.close()
