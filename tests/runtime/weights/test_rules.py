from __future__ import annotations

import pytest

from runtime.weights.rules import Parameter, Shard, WeightsError, fitting, merge, plan, rename, stack, stored_as

QKV = Parameter("layers.0.qkv_proj.weight", (8, 6), (4, 2, 2))
RULES = (merge("q_proj k_proj v_proj", into="qkv_proj"), rename("transformer.h", into="layers"))


def test_a_merged_parameter_is_read_from_its_parts_in_order():
    assert stored_as(QKV, RULES).shards == (
        Shard("transformer.h.0.q_proj.weight", 0, (4, 6)),
        Shard("transformer.h.0.k_proj.weight", 4, (2, 6)),
        Shard("transformer.h.0.v_proj.weight", 6, (2, 6)),
    )


def test_a_merged_bias_is_read_like_its_weight():
    assert [p.shape for p in stored_as(Parameter("layers.0.qkv_proj.bias", (8,), (4, 2, 2)), RULES).shards] == [
        (4,),
        (2,),
        (2,),
    ]


def test_rules_match_whole_segments_of_a_name():
    (shard,) = stored_as(Parameter("my_layers.qkv_proj_norm.weight", (3,)), RULES).shards
    assert shard == Shard("my_layers.qkv_proj_norm.weight", 0, (3,))


def test_the_plan_keeps_the_order_of_the_parameters():
    parameters = [Parameter("b", (2,)), Parameter("a", (1,))]
    assert [load.parameter for load in plan(parameters, (), {"a": (1,), "b": (2,)})] == parameters


def test_everything_wrong_is_named_at_once():
    stored = {
        "transformer.h.0.q_proj.weight": (4, 6),
        "transformer.h.0.k_proj.weight": (2, 7),
        "transformer.h.1.q_proj.weight": (4, 6),
        "transformer.h.0.inv_freq": (3,),
    }
    with pytest.raises(WeightsError) as caught:
        plan([QKV], RULES, stored, ignored=(".inv_freq",))
    assert str(caught.value) == (
        "the weights do not fit the config; missing: transformer.h.0.v_proj.weight; "
        "wrong shape: transformer.h.0.k_proj.weight is [2, 7] instead of [2, 6]; "
        "not part of this architecture: transformer.h.1.q_proj.weight"
    )


def test_hundreds_of_missing_tensors_do_not_drown_the_reader():
    with pytest.raises(WeightsError, match=r"missing: p0, p1, p2, p3, p4, p5 and 294 more$"):
        plan([Parameter(f"p{i}", (1,)) for i in range(300)], (), {})


EXPERT = Parameter("layers.0.experts.7.gate_up.weight", (8, 6), (4, 4), stack=9)
SEPARATE = (merge("gate up", into="gate_up"),)
STACKED = (stack("experts"), rename("gate_up_proj", into="gate_up.weight"))


def test_a_numbered_parameter_may_be_a_slice_of_a_stack():
    assert stored_as(EXPERT, STACKED).shards == (Shard("layers.0.experts.gate_up_proj", 0, (9, 8, 6), 7),)
    assert stored_as(EXPERT, (*SEPARATE, stack("experts"))).shards == (
        Shard("layers.0.experts.gate.weight", 0, (9, 4, 6), 7),
        Shard("layers.0.experts.up.weight", 4, (9, 4, 6), 7),
    )


def test_a_parameter_that_is_one_of_none_keeps_its_number():
    alone = Parameter("layers.0.experts.7.norm", (8,))
    assert stored_as(alone, STACKED).shards == (Shard("layers.0.experts.7.norm", 0, (8,)),)


def test_the_way_that_explains_a_checkpoint_best_is_taken():
    stacked = {"layers.0.experts.gate_up_proj": (9, 8, 6)}
    separate = {"layers.0.experts.7.gate.weight": (4, 6), "layers.0.experts.7.up.weight": (4, 6)}
    for ways in ((SEPARATE, STACKED), (STACKED, SEPARATE)):
        assert fitting([EXPERT], ways, stacked) == STACKED
        assert fitting([EXPERT], ways, separate) == SEPARATE
        assert fitting([EXPERT], ways, {}) == ways[0]


def test_a_stack_of_another_size_is_named():
    with pytest.raises(WeightsError, match=r"gate_up_proj is \[8, 8, 6\] instead of \[9, 8, 6\]"):
        plan([EXPERT], STACKED, {"layers.0.experts.gate_up_proj": (8, 8, 6)})


def test_what_lies_below_a_name_may_be_ignored():
    stored = {"layers.0.norm": (2,), "layers.1.norm": (2,), "layers.10.norm": (2,)}
    plan([Parameter("layers.0.norm", (2,))], (), stored, ignored_below=("layers.1.", "layers.10."))
    with pytest.raises(WeightsError, match=r"not part of this architecture: layers\.10\.norm$"):
        plan([Parameter("layers.0.norm", (2,))], (), stored, ignored_below=("layers.1.",))
