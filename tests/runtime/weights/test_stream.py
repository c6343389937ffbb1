from __future__ import annotations

import threading

import numpy as np
import pytest

from runtime.weights import stream as stream_module
from runtime.weights.rules import Parameter, WeightsError, merge, plan, stack
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
