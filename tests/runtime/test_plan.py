"""EnginePlan: what options come to, and which are refused by name."""

import pytest

from runtime.config import CPU, GIB, EngineConfig, EnginePlan, PlanError
from runtime.kv.layout import LayerShape

LAYERS = (LayerShape(3, 64),) * 30


def resolve(free_bytes=16 * GIB, model_len=8192, dtype="float32", **asked) -> EnginePlan:
    return EnginePlan.resolve(
        EngineConfig(**asked),
        dtype=dtype,
        layers=LAYERS,
        model_len=model_len,
        defaults=CPU,
        free_bytes=free_bytes,
    )


def test_a_token_of_smollm2_costs_46080_bytes_in_float32_and_half_in_bfloat16():
    assert resolve().layout.token_bytes == 30 * 2 * 3 * 64 * 4
    assert resolve(kv_cache_dtype="bfloat16").layout.token_bytes == 30 * 2 * 3 * 64 * 2
    assert resolve(dtype="bfloat16").kv_cache_dtype == "bfloat16"


def test_the_cache_takes_what_was_asked_in_bytes_or_blocks():
    assert resolve(kv_cache_bytes=GIB).num_kv_blocks == GIB // (16 * 46080)
    assert resolve(num_kv_blocks=600).num_kv_blocks == 600


def test_a_cache_smaller_than_the_models_context_shortens_it_and_says_so():
    plan = resolve(free_bytes=GIB)
    assert plan.max_model_len == plan.num_kv_blocks * 16 < 8192
    assert "max-model-len" in plan.notes[0]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"max_model_len": 9000}, "max-model-len"),
        ({"max_model_len": 8192, "num_kv_blocks": 100}, "kv-cache-memory"),
        ({"num_kv_blocks": 0}, "kv-cache-memory"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 64}, "max-num-batched-tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(asked, named):
    with pytest.raises(PlanError, match=named):
        resolve(**asked)


def test_a_small_budget_alone_lowers_the_number_of_rows():
    assert resolve(max_num_batched_tokens=16).max_num_seqs == 15


def test_many_rows_alone_raise_the_budget():
    assert resolve(max_num_seqs=1000).max_num_batched_tokens == 1001
