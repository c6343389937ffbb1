"""Kept: as what a matrix is kept, from what it is stored as and what was asked."""

from __future__ import annotations

import pytest

from runtime.config import WeightPolicy
from runtime.models.kept import Kept
from runtime.weights.rules import BLOCKS, Load, Parameter, Shard

BLOCK_TYPES = frozenset({"Q4_K", "Q6_K"})


def storage(types: list[str], wanted: WeightPolicy, block_types: frozenset[str] = BLOCK_TYPES) -> str:
    shards = tuple(Shard(f"t{i}", i, (1, 256)) for i in range(len(types)))
    kept = Kept(wanted, "float32", {f"t{i}": kind for i, kind in enumerate(types)}, block_types)
    return kept.storage(Load(Parameter("w", (len(types), 256)), shards))


@pytest.mark.parametrize(
    ("types", "kept"),
    [
        (["Q4_K"], BLOCKS),
        (["Q4_K", "Q4_K", "Q6_K"], BLOCKS),
        (["Q4_K", "F16"], "float32"),
        (["Q5_0"], "float32"),  # no kernel here
        (["BF16", "BF16"], "bfloat16"),
        (["F16"], "float16"),
        (["F16", "BF16"], "float32"),
        (["F32"], "float32"),
    ],
)
def test_as_stored_means_what_a_kernel_reads_in_one_piece(types, kept):
    assert storage(types, WeightPolicy("stored", keep_quantized=True)) == kept


def test_quantised_weights_become_numbers_when_asked():
    assert storage(["Q4_K"], WeightPolicy("stored")) == "float32"
    assert storage(["Q4_K"], WeightPolicy("bfloat16")) == "bfloat16"


def test_a_dtype_is_for_numbers_not_for_blocks():
    assert storage(["Q4_K"], WeightPolicy("float16", keep_quantized=True)) == BLOCKS
    assert storage(["BF16"], WeightPolicy("float32", keep_quantized=True)) == "float32"


def test_without_kernels_of_our_own_everything_is_in_the_activations_dtype():
    assert storage(["Q4_K"], WeightPolicy("float32", keep_quantized=True), frozenset()) == "float32"
    assert storage(["BF16"], WeightPolicy("stored", keep_quantized=True), frozenset()) == "float32"
