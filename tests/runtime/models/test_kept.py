"""Kept: as what a matrix is kept, from what it is stored as and what was asked."""

from __future__ import annotations

import pytest

from runtime.config import WeightStorage
from runtime.models.kept import Kept
from runtime.weights.rules import BLOCKS, Load, Parameter, Piece

BLOCK_TYPES = frozenset({"Q4_K", "Q6_K"})


def storage(types: list[str], wanted: WeightStorage, block_types: frozenset[str] = BLOCK_TYPES) -> str:
    pieces = tuple(Piece(f"t{i}", i, (1, 256)) for i in range(len(types)))
    kept = Kept(wanted, "float32", {f"t{i}": kind for i, kind in enumerate(types)}, block_types)
    return kept.storage(Load(Parameter("w", (len(types), 256)), pieces))


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
    assert storage(types, WeightStorage("stored", blocks="stored")) == kept


def test_quantised_weights_become_numbers_when_asked():
    assert storage(["Q4_K"], WeightStorage("stored")) == "float32"
    assert storage(["Q4_K"], WeightStorage("bfloat16")) == "bfloat16"


def test_a_dtype_is_for_numbers_not_for_blocks():
    assert storage(["Q4_K"], WeightStorage("float16", blocks="stored")) == BLOCKS
    assert storage(["BF16"], WeightStorage("float32", blocks="stored")) == "float32"


def test_without_kernels_of_our_own_everything_is_in_the_activations_dtype():
    assert storage(["Q4_K"], WeightStorage("float32", blocks="stored"), frozenset()) == "float32"
    assert storage(["BF16"], WeightStorage("stored", blocks="stored"), frozenset()) == "float32"
