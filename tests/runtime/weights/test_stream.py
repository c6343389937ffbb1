from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import pytest

from runtime.weights import stream as stream_module
from runtime.weights.rules import Parameter, Transposed, WeightsError, merge, plan, stack, stored_as, transform
from runtime.weights.stream import DummyCheckpoint, TensorStream

RULES = (merge("a b", into="ab"),)
PARAMETERS = [Parameter("0.ab", (6, 4), (4, 2)), Parameter("1.ab", (6, 4), (2, 4)), Parameter("norm.weight", (5,))]


class Recorder:
    """A checkpoint that notes what is read, and fills tensors with what it is told."""

    def __init__(self, shapes, fail: str | None = None) -> None:
        self.shapes = shapes
        self.read: list[str] = []
        self.closed = False
        self._fail = fail
        self._lock = threading.Lock()

    def stored_bytes(self, name):
        return 10

    def whole(self, name):
        return False

    def read_rows(self, name, start, out):
        with self._lock:
            self.read.append(name)
        if name == self._fail:
            raise WeightsError(f"{name} is broken")
        out[...] = start + np.arange(len(out)).reshape(-1, *(1,) * (out.ndim - 1)) + (100 if name.endswith("b") else 0)

    def close(self):
        self.closed = True


def loads_of(parameters, shapes):
    return plan(parameters, RULES, shapes)


SHAPES = {"0.a": (4, 4), "0.b": (2, 4), "1.a": (2, 4), "1.b": (4, 4), "norm.weight": (5,)}


def test_parts_land_in_their_rows_in_the_order_asked_for(monkeypatch):
    monkeypatch.setattr(stream_module, "_TASK", 8)  # two rows a read
    seen, checkpoint = [], Recorder(SHAPES)
    with TensorStream(checkpoint) as source:
        read = dict(source.stream(loads_of(PARAMETERS, SHAPES), "float32", seen.append))
    assert list(read) == PARAMETERS
    assert [values[:, 0].tolist() for values in list(read.values())[:2]] == [
        [0, 1, 2, 3, 100, 101],
        [0, 1, 100, 101, 102, 103],
    ]
    assert len(checkpoint.read) == 3 + 3 + 1
    assert [(p.done, p.total) for p in seen] == [(20, 50), (40, 50), (50, 50)]
    assert checkpoint.closed


class Elsewhere:
    """A destination that notes by which pieces it was filled."""

    max_rows = 3

    def __init__(self, shape) -> None:
        self.whole = np.full(shape, -1.0, np.float32)
        self.pieces: list[tuple[int, int]] = []

    @contextmanager
    def rows(self, start, stop):
        piece = np.empty((stop - start, *self.whole.shape[1:]), np.float32)
        yield piece
        self.whole[start:stop] = piece
        self.pieces.append((start, stop))


def test_numbers_go_where_they_are_wanted_a_few_rows_at_a_time():
    placed: dict[str, Elsewhere] = {}

    def destination(parameter, dtype):
        assert dtype == "float32"
        if parameter.name == "1.ab":
            return None
        return placed.setdefault(parameter.name, Elsewhere(parameter.shape))

    with TensorStream(Recorder(SHAPES)) as source:
        read = dict(source.stream(loads_of(PARAMETERS, SHAPES), "float32", lambda progress: None, {}, destination))
    first, second, _ = read.values()
    assert first is placed["0.ab"].whole
    assert first[:, 0].tolist() == [0, 1, 2, 3, 100, 101]
    assert sorted(placed["0.ab"].pieces) == [(0, 3), (3, 4), (4, 6)]
    assert second[:, 0].tolist() == [0, 1, 100, 101, 102, 103]
    assert "1.ab" not in placed
    assert sorted(placed["norm.weight"].pieces) == [(0, 3), (3, 5)]


def test_what_is_not_read_as_it_is_goes_through_an_array():
    shapes = {"experts.a": (3, 4, 4), "experts.b": (3, 2, 4), "turned": (4, 8)}
    parameters = [Parameter("experts.0.ab", (6, 4), (4, 2), stack=3), Parameter("turned", (8, 4))]
    rules = (*RULES, stack("experts"), transform("turned", Transposed()))
    asked: list[str] = []
    with TensorStream(Recorder(shapes)) as source:
        loads = [stored_as(parameter, rules) for parameter in parameters]
        stream = source.stream(loads, "float32", lambda progress: None, {}, lambda p, _: asked.append(p.name))
        assert [values.shape for _, values in stream] == [(6, 4), (8, 4)]
    assert asked == []


def test_a_destination_of_what_cannot_be_read_ends_the_stream():
    stream = TensorStream(Recorder(SHAPES, fail="1.a")).stream(
        loads_of(PARAMETERS, SHAPES), "float32", lambda progress: None, {}, lambda p, _: Elsewhere(p.shape)
    )
    with pytest.raises(WeightsError, match=r"1\.a is broken"):
        list(stream)


def test_slices_of_a_stack_are_read_one_by_one_and_counted_as_their_share():
    shapes = {"experts.a": (3, 4, 4), "experts.b": (3, 2, 4)}
    parameters = [Parameter(f"experts.{i}.ab", (6, 4), (4, 2), stack=3) for i in range(3)]
    seen: list = []
    loads = plan(parameters, (*RULES, stack("experts")), shapes)
    with TensorStream(Recorder(shapes)) as source:
        read = dict(source.stream(loads, "float32", seen.append))
    assert [values[:, 0].tolist() for values in read.values()] == [[i] * 4 + [100 + i] * 2 for i in range(3)]
    assert [(p.done, p.total) for p in seen] == [(6, 18), (12, 18), (18, 18)]


def test_some_parameters_stay_in_float32():
    parameters = [Parameter("exact", (3,), float32=True), Parameter("other", (3,))]
    shapes = {"exact": (3,), "other": (3,)}
    with TensorStream(Recorder(shapes)) as source:
        read = dict(source.stream(loads_of(parameters, shapes), "float16", lambda progress: None))
    assert [values.dtype.name for values in read.values()] == ["float32", "float16"]


def test_it_reads_no_further_ahead_than_allowed(monkeypatch):
    monkeypatch.setattr(stream_module, "_AHEAD", 2 * 64)
    shapes = {f"p{i}": (4, 4) for i in range(50)}  # 64 bytes each
    checkpoint = Recorder(shapes)
    stream = TensorStream(checkpoint).stream(
        loads_of([Parameter(name, shape) for name, shape in shapes.items()], shapes), "float32", lambda progress: None
    )
    next(stream)
    assert len(checkpoint.read) <= 3
    stream.close()
    assert len(checkpoint.read) <= 3


def test_a_tensor_that_cannot_be_read_ends_the_stream(monkeypatch):
    checkpoint = Recorder(SHAPES, fail="1.a")
    threads = threading.active_count()
    with pytest.raises(WeightsError, match=r"1\.a is broken"), TensorStream(checkpoint) as source:
        list(source.stream(loads_of(PARAMETERS, SHAPES), "float32", lambda progress: None))
    assert checkpoint.closed
    assert threading.active_count() == threads


def test_unknown_dtypes_are_refused():
    with pytest.raises(WeightsError, match="int4"):
        list(TensorStream(Recorder(SHAPES)).stream(loads_of(PARAMETERS, SHAPES), "int4", print))


def dummy(seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    shapes = {"big.weight": (3000, 700), "other.weight": (3000, 700), "norm.weight": (64,), "x.bias": (64,)}
    loads = plan([Parameter(name, shape) for name, shape in shapes.items()], (), shapes)
    with TensorStream(DummyCheckpoint(shapes, seed)) as source:
        return {p.name: values for p, values in source.stream(loads, dtype, lambda progress: None)}


def test_dummy_weights_follow_from_the_seed_and_look_like_weights():
    first, again, other = dummy(1), dummy(1), dummy(2)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["big.weight"], other["big.weight"])
    assert not np.array_equal(first["big.weight"], first["other.weight"])
    assert abs(first["big.weight"].std() - 0.02) < 1e-3
    assert len(np.unique(first["big.weight"], axis=0)) == 3000
    assert (first["norm.weight"] == 1).all()
    assert (dummy(1, "bfloat16")["norm.weight"] == 0x3F80).all()
