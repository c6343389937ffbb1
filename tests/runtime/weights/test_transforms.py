"""Forms in which checkpoints store tensors, made by hand and undone, in every element type."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.weights.dtypes import undo
from runtime.weights.rules import (
    GroupedRows,
    InterleavedHalves,
    InterleavedRope,
    OneRow,
    Parameter,
    Shard,
    SwappedHalves,
    Transposed,
    UnitOffsetNorm,
    rename,
    stored_as,
    transform,
)


def numbers(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_a_transposed_matrix_is_turned_back(dtype):
    stored = numbers(3, 5, dtype=dtype)
    values = undo(Transposed(), stored, (5, 3))
    assert values.flags.c_contiguous
    np.testing.assert_array_equal(values, stored.T)


@pytest.mark.parametrize("rest", [(), (7,)])
def test_rotary_pairs_that_are_neighbours_are_taken_apart(rest):
    """Two heads of six dims that turn, of which four do, and one that does not."""
    stored = numbers(18, *rest)
    order = [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    values = undo(InterleavedRope(2, 6, 4), stored.copy(), (18, *rest))
    np.testing.assert_array_equal(values, stored[order])


def test_norm_weights_by_head_become_one_vector():
    how = InterleavedRope(2, 4, 4, by_head=True)
    assert how.stored_shape((8,)) == (2, 4)
    np.testing.assert_array_equal(undo(how, numbers(2, 4), (8,)), [0, 2, 1, 3, 4, 6, 5, 7])


def test_q_k_and_v_stored_by_kv_head_are_sorted():
    stored = numbers(
        2 * (3 + 2) * 2, 4
    )  # two kv heads, each with three query heads, its key and its value, two rows each
    by_head = stored.reshape(2, 5, 2, 4)
    expected = [by_head[:, :3], by_head[:, 3], by_head[:, 4]]
    values = undo(GroupedRows(2, (6, 2, 2)), stored.copy(), (20, 4))
    np.testing.assert_array_equal(values, np.concatenate([part.reshape(-1, 4) for part in expected]))


def test_rows_behind_the_groups_stay():
    """Two heads of a query row and a gate row each, then keys and values."""
    values = undo(GroupedRows(2, (1, 1)), numbers(7), (7,))
    np.testing.assert_array_equal(values, [0, 2, 1, 3, 4, 5, 6])


def test_what_is_stored_less_one_gets_it_back():
    np.testing.assert_array_equal(undo(UnitOffsetNorm(), numbers(3), (3,)), [1, 2, 3])


def test_a_form_is_found_by_our_name_whatever_theirs_is():
    rules = (rename("h", into="layers"), rename("c_attn", into="qkv_proj"), transform("qkv_proj.weight", Transposed()))
    load = stored_as(Parameter("layers.0.qkv_proj.weight", (6, 2)), rules)
    assert (load.shards, load.transform) == ((Shard("h.0.c_attn.weight", 0, (2, 6)),), Transposed())
    assert stored_as(Parameter("layers.0.qkv_proj.bias", (6,)), rules).transform is None


@pytest.mark.parametrize("rest", [(), (5,)], ids=["bias", "weight"])
def test_halves_that_take_turns_stand_one_after_the_other_again(rest):
    wanted = np.arange(6 * int(np.prod(rest)), dtype=np.float32).reshape(6, *rest)
    stored = np.stack([wanted[:3], wanted[3:]], axis=1).reshape(wanted.shape)
    assert np.array_equal(undo(InterleavedHalves(), stored.copy(), wanted.shape), wanted)
    how, columns = InterleavedHalves(as_columns=True), np.ascontiguousarray(stored.T)
    assert how.stored_shape(wanted.shape) == columns.shape
    assert np.array_equal(undo(how, columns, wanted.shape), wanted)


def test_halves_the_wrong_way_round_are_turned():
    assert np.array_equal(undo(SwappedHalves(), np.array([[4], [5], [0], [1]]), (4, 1)), [[0], [1], [4], [5]])


def test_a_vector_may_be_a_matrix_of_one_row():
    assert OneRow().stored_shape((4,)) == (1, 4)
    assert np.array_equal(undo(OneRow(), np.ones((1, 4), np.float32), (4,)), np.ones(4))
