"""A native program at the border: whatever is called in whatever order, bad arguments raise and no memory is touched."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ops import native


@pytest.fixture(autouse=True)
def _native() -> None:
    if refusal := native.missing:
        pytest.skip(refusal)
    if not hasattr(native.module.Program, "finished"):
        pytest.skip("oneloop_native is older than these checks")


def positions(num_tokens: int) -> torch.Tensor:
    return torch.zeros(num_tokens, dtype=torch.int64)


def test_a_program_that_is_not_finished_does_not_run():
    program = native.module.Program()
    x = program.register(8)
    program.scale(x, 2.0)
    for num_tokens in (0, 1):
        with pytest.raises(ValueError, match="the program is not finished"):
            program.run([], positions(num_tokens), [])


def test_a_finish_that_fails_leaves_the_program_as_it_was():
    program = native.module.Program()
    x = program.register(8)
    program.scale(x, 2.0)
    for wrong in ([1], [-1], [x, 7]):
        with pytest.raises(IndexError):
            program.finish(wrong)
    with pytest.raises(ValueError, match="external twice"):
        program.finish([x, x])
    assert not program.finished
    with pytest.raises(ValueError, match="not finished"):
        program.run([torch.ones(1, 8)], positions(1), [])
    program.scale(x, 3.0)
    program.finish([x])
    assert program.finished
    numbers = torch.ones(2, 8)
    program.run([numbers], positions(2), [])
    assert torch.equal(numbers, torch.full((2, 8), 6.0))


def test_nothing_comes_after_the_end():
    program = native.module.Program()
    x = program.register(8)
    program.finish([x])
    for late in (
        lambda: program.scale(x, 2.0),
        lambda: program.finish([x]),
        lambda: program.truncate(0),
        lambda: program.register(8),
    ):
        with pytest.raises(ValueError):
            late()


def test_a_program_of_nothing_is_finished_too():
    program = native.module.Program()
    program.finish([])
    program.run([], positions(3), [])
    with pytest.raises(ValueError, match="finished"):
        program.finish([])


@pytest.mark.parametrize("width", [0, -1, 2**31 + 1, 2**62, 2**63 - 1])
def test_a_register_has_a_width_that_can_be_counted(width):
    with pytest.raises(ValueError, match="width"):
        native.module.Program().register(width)


def test_more_floats_than_can_be_counted_are_refused():
    program = native.module.Program()
    widest = [program.register(2**31) for _ in range(1024)]
    for _ in range(2):  # all are in use at once: each is read again behind the last
        for x, y in itertools.pairwise(widest):
            program.add(x, y)
    program.finish([])
    with pytest.raises(ValueError, match="too wide for so many tokens"):
        program.run([], positions(2**20), [])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(2**61 + 1, 1), (2**61 + 2, 2**61 + 2), (2, 1), (0, 1), (1, 0), (-1, 1)]
)
def test_heads_that_do_not_fit_their_register_are_refused_however_they_multiply(num_heads, num_kv_heads):
    program = native.module.Program()
    qkv, out = program.register(24), program.register(8)
    cache = torch.zeros(1, 1, 8, 8)
    shape = native.module.AttendShape(num_heads, num_kv_heads, 8, 1.0)
    with pytest.raises(ValueError, match=r"heads|wide"):
        program.attend(qkv, out, shape, torch.zeros(4, 8), None, None, 0.0, None, cache, cache, 0)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_strides_of_an_empty_array_say_nothing(shape):
    """numpy's and torch's differ, and neither is read."""
    strided = np.zeros((8, 16), np.float32)[::2, ::2]
    for empty in (
        np.zeros(shape, np.float32),
        np.array([], np.float32).reshape(shape),
        strided[: shape[0], : shape[1]],
        torch.zeros(shape),
    ):
        out = np.zeros(shape, np.float32)
        native.module.rms_norm(empty, np.ones(shape[1], np.float32), 1e-5, out)


def test_an_empty_list_of_rows_made_by_numpy_can_be_sampled():
    ids = torch.from_numpy(np.array([], np.int64))
    table = torch.ones(4, 8)
    packed = native.module.PackedLinear(table, None)
    packed.rows(ids, torch.empty(0, 8))
