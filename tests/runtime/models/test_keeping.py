"""Keeping: as what a matrix is kept, from what it is stored as and what was asked."""

from __future__ import annotations

import pytest

from runtime.config import WeightPolicy
from runtime.models.reading import Keeping
from runtime.weights.rules import AS_STORED, Parameter, ReadPlan, Shard

BLOCK_TYPES = frozenset({"Q4_K", "Q6_K"})


def refusal(formats: frozenset[str]) -> str | None:
    """Of kernels that read these block types, and plain numbers in any width."""
    unread = formats - BLOCK_TYPES - {"float32", "bfloat16", "float16"}
    return f"nothing reads {', '.join(unread)}" if unread else None


def only_float32(formats: frozenset[str]) -> str | None:
    return None if formats == {"float32"} else "only float32"


def case(types: list[str], policy: WeightPolicy, rounded: tuple[str, ...] = ()) -> tuple[Keeping, ReadPlan]:
    shards = tuple(Shard(f"t{i}", i, (1, 256)) for i in range(len(types)))
    keeping = Keeping(policy, "float32", {f"t{i}": kind for i, kind in enumerate(types)}, rounded)
    return keeping, ReadPlan(Parameter("w", (len(types), 256)), shards)


def storage(types: list[str], policy: WeightPolicy, refusal=refusal) -> str:
    keeping, load = case(types, policy)
    return keeping.storage(load, refusal)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (["Q4_K"], AS_STORED),
        (["Q4_K", "Q4_K", "Q6_K"], AS_STORED),
        (["Q4_K", "F16"], "float32"),
        (["Q5_0"], "float32"),  # no kernel here
        (["BF16", "BF16"], "bfloat16"),
        (["F16"], "float16"),
        (["F16", "BF16"], "float32"),
        (["F32"], "float32"),
    ],
)
def test_as_stored_means_what_a_kernel_reads_in_one_piece(types, expected):
    assert storage(types, WeightPolicy("stored", keep_quantized=True)) == expected


def test_quantised_weights_become_numbers_when_asked():
    assert storage(["Q4_K"], WeightPolicy("stored")) == "float32"
    assert storage(["Q4_K"], WeightPolicy("bfloat16")) == "bfloat16"


@pytest.mark.parametrize(
    ("online", "types", "rounded"),
    [
        ("int16", ["Q4_K"], True),
        ("int16", ["Q8_0"], True),
        ("int8", ["Q4_K", "Q8_0"], True),
        ("int8", ["Q8_0"], False),
        ("int8", ["w8", "Q8_0"], False),
        ("fp8", ["w4"], True),
        ("fp8", ["fp8"], False),
        ("w4", ["fp8"], True),
        ("w4", ["w4"], False),
    ],
)
def test_weights_to_be_rounded_are_decoded_unless_the_checkpoint_has_rounded_them_so(online, types, rounded):
    policy = WeightPolicy("stored", keep_quantized=True, online=online)
    keeping, load = case(types, policy, ("w",))
    assert keeping.storage(load, lambda formats: None) == ("float32" if rounded else AS_STORED)
    told = f"weights in {', '.join(types)} are decoded, and rounded to {online}"
    assert keeping.widened(load, lambda formats: None) == (told if rounded else None)
    another, load = case(types, policy, ("another",))
    assert another.storage(load, lambda formats: None) == AS_STORED


def test_a_dtype_is_for_numbers_not_for_blocks():
    assert storage(["Q4_K"], WeightPolicy("float16", keep_quantized=True)) == AS_STORED
    assert storage(["BF16"], WeightPolicy("float32", keep_quantized=True)) == "float32"


def test_without_kernels_of_our_own_everything_is_in_the_activations_dtype():
    assert storage(["Q4_K"], WeightPolicy("float32", keep_quantized=True), only_float32) == "float32"
    assert storage(["BF16"], WeightPolicy("stored", keep_quantized=True), only_float32) == "float32"


@pytest.mark.parametrize(
    ("types", "policy", "said"),
    [
        (["Q4_K"], WeightPolicy("float32", keep_quantized=True), None),
        (["Q5_0"], WeightPolicy("stored", keep_quantized=True), "weights in Q5_0 become float32: nothing reads Q5_0"),
        (["Q5_0"], WeightPolicy("stored"), None),  # as was asked
        (["BF16"], WeightPolicy("float32", keep_quantized=True), None),
    ],
)
def test_quantised_weights_that_no_kernel_reads_are_logged(types, policy, said):
    keeping, load = case(types, policy)
    assert keeping.widened(load, refusal) == said
