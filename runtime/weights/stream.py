"""TensorStream: reads an open checkpoint parameter by parameter. A few threads read and convert ahead of the consumer.

At most `_AHEAD` bytes are read ahead, so a model is never in memory twice. The module is independent of the file format. It also
merges tensors: each stored tensor is written directly to its rows of the parameter."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Protocol, Self
from zlib import crc32

import numpy as np

from runtime.api import LoadProgress
from runtime.weights.dequantize import Bytes
from runtime.weights.dtypes import ARRAY_TYPES, Array, empty, store, undo
from runtime.weights.rules import (
    AS_STORED,
    Cut,
    Destination,
    Destinations,
    Parameter,
    ReadPlan,
    Report,
    Shape,
    Shard,
    Span,
    StoredRows,
    Transform,
    UnitOffsetNorm,
    WeightsError,
)  # fmt: skip

_AHEAD = 64 << 20  # bytes of parameters in progress or waiting
_SHARE_AHEAD = 8  # only one in so many bytes of a destination counts, since they use no host memory
_TASK = 1 << 21  # weights per task of a thread
_MAX_THREADS = 8


class TensorReader(Protocol):
    """Reader of tensors in open files, by Hugging Face name. `types`: dtypes of the tensors, by ggml's names."""

    shapes: Mapping[str, Shape]
    types: Mapping[str, str]

    def stored_bytes(self, name: str) -> int: ...

    def read_rows(self, name: str, start: int, out: Array) -> None:
        """Read the values of rows (indices of the first dimension) from `start` on, until the contiguous `out` is full, in the
        dtype of `out`. Thread-safe."""
        ...

    def read_stored(self, name: str, start: int, stop: int) -> dict[str, Bytes]:
        """Return rows [start, stop) in the kernels' layout, by role ("weight", "scales"), each [rows, bytes per row].
        Thread-safe."""
        ...

    def whole(self, name: str) -> bool:
        """Return whether reading some rows of the tensor takes as long as reading all."""
        ...

    def columns(self, name: str, arrays: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        """Return columns `span` of `arrays`, a result of `read_stored`. Raises WeightsError if they cannot be split there."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _InFlight:
    load: ReadPlan
    values: Array
    reads: list[Future[None]]
    stored_bytes: int

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def finish(self) -> tuple[Parameter, Array]:
        for read in self.reads:
            read.result()
        parameter, transform, cut = self.load.parameter, self.load.transform, self.load.cut
        if transform is None:
            return parameter, self.values
        if cut is None:
            return parameter, undo(transform, self.values, parameter.shape)
        return parameter, _cut(undo(transform, self.values, cut.shape), cut)


@dataclass(frozen=True, slots=True)
class _PlacedInFlight:
    load: ReadPlan
    destination: Destination
    reads: list[Future[None]]
    stored_bytes: int

    @property
    def nbytes(self) -> int:
        return int(self.destination.whole.nbytes) // _SHARE_AHEAD

    def finish(self) -> tuple[Parameter, Any]:
        for read in self.reads:
            read.result()
        return self.load.parameter, self.destination.whole


@dataclass(frozen=True, slots=True)
class _StoredInFlight:
    load: ReadPlan
    formats: list[str]
    reads: list[Future[dict[str, Bytes]]]
    stored_bytes: int

    @property
    def nbytes(self) -> int:
        return self.stored_bytes

    def finish(self) -> tuple[Parameter, list[StoredRows]]:
        parts = [StoredRows(name, read.result()) for name, read in zip(self.formats, self.reads, strict=True)]
        transform = self.load.transform
        return self.load.parameter, parts if transform is None else [_undone(transform, rows) for rows in parts]


class TensorStream:
    """Open checkpoint that is read once, an implementation of `rules.TensorSource`. Use it as a context manager, which closes the
    files."""

    def __init__(self, checkpoint: TensorReader) -> None:
        self._checkpoint = checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoint.close()

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._checkpoint.shapes

    @property
    def types(self) -> Mapping[str, str]:
        return self._checkpoint.types

    def stream(
        self, loads: Sequence[ReadPlan], dtype: str, report: Report, storage: Mapping[str, str] = MappingProxyType({}),
        destinations: Destinations | None = None,
    ) -> Generator[tuple[Parameter, Any], None, None]:  # fmt: skip
        total = sum(self._stored_bytes(shard) for load in loads for shard in load.shards)
        done = ahead = 0
        waiting: deque[_InFlight | _PlacedInFlight | _StoredInFlight] = deque()
        pool = ThreadPoolExecutor(_num_threads(), "weights")
        try:
            for load in loads:
                wide = load.parameter.float32 or isinstance(load.transform, UnitOffsetNorm)
                target = "float32" if wide else storage.get(load.parameter.name, dtype)
                waiting.append(self._begin(load, target, pool, destinations))
                ahead += waiting[-1].nbytes
                while waiting and (ahead > _AHEAD or load is loads[-1]):
                    ahead -= waiting[0].nbytes
                    done += waiting[0].stored_bytes
                    yield waiting.popleft().finish()
                    report(LoadProgress("weights", done, total, "B"))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _begin(
        self, load: ReadPlan, target: str, pool: ThreadPoolExecutor, destinations: Destinations | None
    ) -> _InFlight | _PlacedInFlight | _StoredInFlight:
        if target == AS_STORED:
            return self._begin_stored(load, pool)
        if destinations is not None and self._is_read_as_it_is(load):
            destination = destinations(load.parameter, target)
            if destination is not None:
                return self._begin_placed(load, destination, pool)
        return self._begin_array(load, target, pool)

    def _is_read_as_it_is(self, load: ReadPlan) -> bool:
        return (
            sum(shard.rows[0] for shard in load.shards) == load.parameter.shape[0]
            and load.transform is None
            and load.cut is None
            and all(shard.index is None and shard.columns is None for shard in load.shards)
            and not any(self._checkpoint.whole(shard.name) for shard in load.shards)
        )

    def _begin_placed(self, load: ReadPlan, destination: Destination, pool: ThreadPoolExecutor) -> _PlacedInFlight:
        reads = []
        for shard in load.shards:
            first, num = 0 if shard.taken is None else shard.taken.start, shard.rows[0]
            for start in range(0, num, destination.max_rows):
                stop = min(num, start + destination.max_rows)
                place = destination, shard.start + start, shard.start + stop
                reads.append(pool.submit(self._read_placed, *place, shard.name, first + start))
        return _PlacedInFlight(load, destination, reads, sum(map(self._stored_bytes, load.shards)))

    def _read_placed(self, destination: Destination, start: int, stop: int, name: str, first: int) -> None:
        with destination.rows(start, stop) as rows:
            self._checkpoint.read_rows(name, first, rows)

    def _begin_array(self, load: ReadPlan, dtype: str, pool: ThreadPoolExecutor) -> _InFlight:
        shape = load.parameter.shape if load.cut is None else load.cut.shape
        values = empty(shape if load.transform is None else load.transform.stored_shape(shape), dtype)
        if sum(shard.rows[0] for shard in load.shards) < len(values):
            values.fill(0)
        reads: list[Future[None]] = []
        for shard in load.shards:
            rows = values[shard.start : shard.start + shard.rows[0]]
            reads.extend(self._read(shard, rows, pool))
        return _InFlight(load, values, reads, sum(map(self._stored_bytes, load.shards)))

    def _read(self, shard: Shard, rows: Array, pool: ThreadPoolExecutor) -> Iterator[Future[None]]:
        step = len(rows) if self._checkpoint.whole(shard.name) else max(1, _TASK // max(1, prod(shard.whole[1:])))
        if shard.index is not None:  # stacked tensors are read slice by slice
            if shard.taken is None and shard.columns is None:
                yield pool.submit(self._checkpoint.read_rows, shard.name, shard.index, rows[None])
            else:
                yield pool.submit(self._read_cut, shard, shard.index, rows)
            return
        first = 0 if shard.taken is None else shard.taken.start
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            if shard.columns is None:
                yield pool.submit(self._checkpoint.read_rows, shard.name, first + start, part)
            else:
                yield pool.submit(self._read_cut, shard, first + start, part)

    def _read_cut(self, shard: Shard, first: int, out: Array) -> None:
        buffer = np.empty((len(out), *shard.whole[1:]) if shard.index is None else (1, *shard.whole), out.dtype)
        self._checkpoint.read_rows(shard.name, first, buffer)
        taken = slice(None) if shard.taken is None else slice(*shard.taken)
        rows = buffer if shard.index is None else buffer[0, taken]
        out[...] = rows if shard.columns is None else rows[:, slice(*shard.columns)]

    def _begin_stored(self, load: ReadPlan, pool: ThreadPoolExecutor) -> _StoredInFlight:
        reads = [pool.submit(self._read_stored, shard) for shard in load.shards]
        formats = [self.types[shard.name] for shard in load.shards]
        return _StoredInFlight(load, formats, reads, sum(map(self._stored_bytes, load.shards)))

    def _read_stored(self, shard: Shard) -> dict[str, Bytes]:
        taken = shard.taken or Span(0, shard.whole[0])
        if shard.index is None:
            arrays = self._checkpoint.read_stored(shard.name, *taken)
        else:  # stacked tensors are read slice by slice
            stacked = self._checkpoint.read_stored(shard.name, shard.index, shard.index + 1)
            arrays = {role: each.reshape(shard.whole[0], -1)[slice(*taken)] for role, each in stacked.items()}
        if shard.columns is None:
            return arrays
        return self._checkpoint.columns(shard.name, arrays, shard.columns)

    def _stored_bytes(self, shard: Shard) -> int:
        """Return the number of bytes in the file that are read for the shard. Rows are read with all their columns."""
        whole = self._checkpoint.stored_bytes(shard.name)
        whole = whole if shard.index is None else whole // shard.shape[0]
        return whole if shard.taken is None else whole * shard.rows[0] // shard.whole[0]


def _cut(values: Array, cut: Cut) -> Array:
    rows = np.concatenate([values[span.start : span.stop] for span in cut.rows])
    return rows if cut.columns is None else np.ascontiguousarray(rows[:, slice(*cut.columns)])


def _undone(transform: Transform, stored: StoredRows) -> StoredRows:
    arrays = {role: undo(transform, rows, rows.shape) for role, rows in stored.arrays.items()}
    return StoredRows(stored.format, arrays)


def _num_threads() -> int:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_THREADS, cpus)


class DummyCheckpoint:
    """Checkpoint of random weights with given shapes, for load tests. They depend only on the seed and the tensor's name. Norms are
    1.

    All tensors are copied from one table of normal samples, which is fast. The table's length is prime, so rows of any width start
    at different positions in it."""

    _LENGTH = 1_048_583
    _STD = 0.02

    def __init__(self, shapes: Mapping[str, Shape], seed: int) -> None:
        self.shapes = shapes
        self.types: Mapping[str, str] = dict.fromkeys(shapes, "F32")
        draws = np.random.default_rng(seed).standard_normal(self._LENGTH, np.float32) * np.float32(self._STD)
        self._tables: dict[np.dtype[np.generic], Array] = {}
        for dtype in ARRAY_TYPES:
            table = empty(draws.shape, dtype)
            store(draws, table)
            self._tables[table.dtype] = table

    def close(self) -> None:
        self._tables.clear()

    def stored_bytes(self, name: str) -> int:
        return 4 * prod(self.shapes[name])

    def read_stored(self, name: str, start: int, stop: int) -> dict[str, Bytes]:
        rows = np.empty((stop - start, *self.shapes[name][1:]), np.float32)
        self.read_rows(name, start, rows)
        return {"weight": rows.reshape(stop - start, -1).view(np.uint8)}

    def whole(self, name: str) -> bool:
        return False

    def columns(self, name: str, arrays: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        raise WeightsError(f"{name}: columns of random weights are cut as numbers")

    def read_rows(self, name: str, start: int, out: Array) -> None:
        if name.endswith("norm.weight"):
            store(np.ones(out.shape, np.float32), out)
            return
        table, flat = self._tables[out.dtype], out.reshape(-1)
        at = (crc32(name.encode()) + start * prod(self.shapes[name][1:])) % self._LENGTH
        done = 0
        while done < len(flat):
            count = min(len(flat) - done, self._LENGTH - at)
            flat[done : done + count] = table[at : at + count]
            done, at = done + count, 0
