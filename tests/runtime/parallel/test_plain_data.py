"""What processes of a model say to each other comes as it went, and nothing else can be made of what comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from runtime.api import PoolingParams, SamplingParams, TokenLogprobs
from runtime.batch import (
    SAMPLE,
    Pool,
    PromptLogprobsSpan,
    RowBinding,
    Sample,
    ScheduledBatch,
    ScheduledRow,
    decode_row,
)
from runtime.config import DeviceDefaults, EngineConfig, EnginePlan
from runtime.fault import Fault
from runtime.kv.block_table import NewBlocks
from runtime.kv.kinds import AttentionKVSpec, Full, RecurrentStateSpec, State, Window
from runtime.parallel.connection import MODULES, packed, unpacked
from runtime.parallel.messages import Build, Failed, ModelName, StepDone, Work
from runtime.parallel.stages import Draws, Turn
from runtime.policy.fairness import Fair
from runtime.policy.step_budget import Goals, PlatformSteps, Slowdown, TimedBudget
from runtime.policy.step_cost import StepCost, TimedSteps
from runtime.step import RowMasks, StepResult

PARAMS = SamplingParams(
    4, temperature=0.5, seed=-(1 << 63), logit_bias=MappingProxyType({7: -100.0}), stop_token_ids=frozenset({1, 2}),
    allowed_token_ids=frozenset({3}), logprob_token_ids=(1, 2),
)  # fmt: skip
ROWS = (
    decode_row(1, 5, 9, (), ()),
    decode_row(2, 6, 40, (77,), (NewBlocks(0, 2, [3]),)),
    ScheduledRow(
        3, 0, 0, 4, (1, 2, 3, 4), new_blocks=(NewBlocks(0, 0, [8, 9]), NewBlocks(1, 0, [7])), work=None,
        binding=RowBinding(PARAMS, 1 << 70, [1, 2, 3, 4, 5], (), masked=True),
        prompt_logprobs=PromptLogprobsSpan(1, (2, 3), 2),
    ),
    ScheduledRow(4, 1, 7, 3, (5,), (6, 7), work=Sample(2, masked=True), num_proposed=2, restart=7),
    ScheduledRow(5, 2, 0, 1, (5,), work=Pool(PoolingParams("embed", label_token_ids=(1,)), is_last=False)),
)  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        Work(3, ScheduledBatch(ROWS, 10, 0, follows=False), Turn(7, ((1, 2), ()), Draws((5,), (0, 1))), to_sample=True),
        Work(1, ScheduledBatch(ROWS[:1] * 3, 3, 1, decodes_only=True), Turn(), of=2),
        ScheduledBatch((), 0, 0),
        StepDone(4, StepResult([[1, 2], [3]], [[TokenLogprobs(-0.5, 1, ((4, -0.5), (5, float("-inf"))))], None]), 0.25),
        Failed(1, Fault.MEMORY, "no room", ("rank 1",), row=3),
        Build(
            EngineConfig(end_token_ids=frozenset({9}), cache_key=b"\xff\0"),
            ModelName("a/b", None), (("10.0.0.1", 4), ("10.0.0.2", 5)),
        ),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_messages_come_as_they_went(message):
    come = unpacked(packed(message))
    assert come == message


def test_a_plan_comes_with_what_makes_its_policy_and_its_budget():
    kv = AttentionKVSpec(2, 32)
    layers = (Full(kv), Window(kv, 20), State(RecurrentStateSpec(((4, 8),))))
    config = EngineConfig(scheduling_policy="fair", speculative_method="ngram_cpu")
    defaults = DeviceDefaults("float32", 8, 64, lambda free: free)
    plan = EnginePlan.resolve(
        config, dtype="float32", layers=layers, model_len=100, defaults=defaults, free_bytes=1 << 24
    ).timed(config, TimedSteps(0.01, 1e-3), 1 << 20, PlatformSteps(0.2, 32, Slowdown(2.4, 5.0)))
    come = unpacked(packed(plan))
    assert replace(come, step_budget=plan.step_budget) == plan
    assert come.policy is Fair
    budget = come.step_budget
    assert isinstance(budget, partial)
    assert (budget.func, budget.args, budget.keywords) == (
        TimedBudget,
        plan.step_budget.args,
        plan.step_budget.keywords,
    )
    assert budget().goals == plan.step_budget().goals


def test_masks_may_be_written_to_as_before():
    words = np.arange(6, dtype=np.int32).reshape(2, 3) - 3
    come = unpacked(packed(RowMasks((4, 5), words)))
    assert come.rows == (4, 5)
    assert come.words.dtype == words.dtype
    assert np.array_equal(come.words, words)
    come.words[0, 0] = 9


def test_what_is_no_plain_data_neither_goes_nor_comes():
    class Row(ScheduledRow):
        pass

    budget = TimedBudget(StepCost.assumed(TimedSteps(0.01, 1e-3)), Goals(1.0, 1.0))
    for each in (object(), len, budget, {"a": Row(*ROWS[0])}):
        with pytest.raises(TypeError, match="is no plain data"):
            packed(each)
    for said in (["Popen", ["rm"]], ["TimedBudget", None], [99], [5, "system"], [8, 1, [[1, 2, 3, 4]]]):
        with pytest.raises((ValueError, TypeError, LookupError)):
            unpacked(msgspec.msgpack.encode(said))


def test_no_two_classes_have_one_name():
    names = Counter(
        name
        for module in MODULES
        for name, each in vars(module).items()
        if isinstance(each, type) and each.__module__ == module.__name__
    )
    assert names.most_common(1)[0][1] == 1
    assert unpacked(packed(SAMPLE)) == SAMPLE
