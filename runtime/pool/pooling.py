"""Pooling: embeddings and scores of rows whose work is `Pool`, computed from final hidden states in float32.

A prompt may be computed in chunks even if its pooling reads all tokens. Partial results are kept by row, in launch order, until
the last chunk. They are reset when the row starts at position 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import ops
from ops.transfer import index_on, to_host
from runtime.api import PoolingParams
from runtime.batch import Pool, RowBinding, ScheduledRow
from runtime.models.model import Model


class _Asked(NamedTuple):
    """Pooling `work` of one `row`, whose tokens in the step are [begin, stop)."""

    row: ScheduledRow
    work: Pool
    begin: int
    stop: int

    @property
    def by_token(self) -> bool:
        return self.work.params.task.startswith("token_")

    @property
    def tokens(self) -> range:
        """Tokens whose hidden states are read."""
        if self.by_token or self.work.params.pooling == "mean":
            return range(self.begin, self.stop)
        if self.work.params.pooling == "cls":
            return range(self.begin, self.begin + (self.row.start == 0))
        return range(self.stop - self.work.is_last, self.stop)


@dataclass(frozen=True, slots=True)
class _Group:
    """Pooled values of several `rows`, [sum(sizes), D] float32. `sizes`: number of vectors for each row. `by_token`: True if a
    row has one vector per token."""

    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    by_token: bool
    values: Tensor

    def views(self) -> list[tuple[int, memoryview | None]]:
        values = self.values.numpy()
        finite = np.isfinite(values).all(axis=1).tolist()
        found: list[tuple[int, memoryview | None]] = []
        for row, size, stop in zip(self.rows, self.sizes, accumulate(self.sizes), strict=True):
            own = values[stop - size : stop]
            view = (own if self.by_token else own[0]).data
            found.append((row, view if all(finite[stop - size : stop]) else None))
        return found


@dataclass(frozen=True, slots=True)
class PooledRows:
    groups: tuple[_Group, ...]

    def to_host(self) -> PooledRows:
        return PooledRows(
            tuple(_Group(each.rows, each.sizes, each.by_token, to_host(each.values)) for each in self.groups)
        )

    def by_row(self) -> dict[int, memoryview | None]:
        """Return the pooled vector or vectors of each row, by row number; None if a value is not finite. The tensors must be on
        the host."""
        return dict(found for group in self.groups for found in group.views())


class Pooling:
    """Pooling for one model. `compute` must be called for each step, in launch order."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kept: dict[int, list[Tensor]] = {}  # of prompts under way: sums of vectors, or each piece's tokens

    def bind(self, row: int, binding: RowBinding) -> None:
        self._kept.pop(row, None)

    def compute(self, rows: Sequence[ScheduledRow], hidden: Any, device: torch.device) -> PooledRows | None:
        """Pool the hidden states `hidden` of a step, for those of its `rows` that request it. Return None if no row has a result
        yet."""
        stops = accumulate(row.num_tokens for row in rows)
        asked = [
            _Asked(row, row.work, stop - row.num_tokens, stop)
            for row, stop in zip(rows, stops, strict=True)
            if type(row.work) is Pool
        ]
        if not asked:
            return None
        if len(asked) == len(rows) and _are_alike(asked):
            return PooledRows((self._alike(asked, hidden, device),))
        by_labels = [each for each in asked if each.work.params.label_token_ids]
        pooled = [each for each in asked if not each.work.params.label_token_ids]
        groups = [self._labels(each, hidden, device) for each in by_labels if each.work.is_last]
        if pooled:
            groups += self._pooled(pooled, hidden, device)
        return PooledRows(tuple(groups)) if groups else None

    def _alike(self, asked: Sequence[_Asked], hidden: Any, device: torch.device) -> _Group:
        """Pool complete texts with equal parameters in a few calls, regardless of their number. The step must have no other
        rows."""
        rows = tuple(each.row.row for each in asked)
        for row in rows:
            self._kept.pop(row, None)
        params, stops = asked[0].work.params, [each.stop for each in asked]
        if len(asked) == 1:  # somebody waits for it, and an upload takes longer than all the rest
            stop, by_mean = stops[0], params.pooling == "mean"
            first = 0 if by_mean or params.pooling == "cls" else stop - 1
            states = self._model.final_hidden(hidden, slice(first, stop if by_mean else first + 1))
            vectors = states.mean(dim=0, keepdim=True, dtype=torch.float32) if by_mean else states.float()
        elif params.pooling == "mean":
            states = self._model.final_hidden(hidden, slice(0, stops[-1]))
            vectors = ops.segment_mean(states, index_on(device, [0, *stops]))
        else:
            read = [each.begin for each in asked] if params.pooling == "cls" else [stop - 1 for stop in stops]
            vectors = self._model.final_hidden(hidden, index_on(device, read)).float()
        return self._finished(params, rows, (1,) * len(rows), vectors)

    def _labels(self, asked: _Asked, hidden: Any, device: torch.device) -> _Group:
        params = asked.work.params
        logits = self._model.compute_logits(hidden, index_on(device, [asked.stop - 1]))
        scores = logits[:, index_on(device, list(params.label_token_ids))].float()
        if params.use_activation:
            scores = scores.softmax(dim=1) if scores.shape[1] > 1 else scores.sigmoid()
        return _Group((asked.row.row,), (1,), False, scores)

    def _pooled(self, asked: Sequence[_Asked], hidden: Any, device: torch.device) -> list[_Group]:
        tokens = [each.tokens for each in asked]
        index = _joined(tokens, device)
        states = self._model.final_hidden(hidden, index).float()
        sizes = [len(span) for span in tokens]
        done: dict[PoolingParams, list[tuple[int, Tensor]]] = {}
        for each, vectors in zip(asked, _vectors(asked, states, sizes), strict=True):
            whole = self._whole(each, vectors)
            if whole is not None:
                done.setdefault(_kind(each.work.params), []).append((each.row.row, whole))
        return [self._finish(params, found) for params, found in done.items()]

    def _whole(self, asked: _Asked, vectors: Tensor) -> Tensor | None:
        """Return the row's complete vectors. If the prompt has further chunks, keep `vectors` and return None."""
        row, work = asked.row.row, asked.work
        if asked.row.start == 0:
            self._kept.pop(row, None)
        if not work.is_last:
            kept = self._kept.setdefault(row, [])
            if asked.by_token or not kept:
                kept.append(vectors)
            else:
                kept[0] = kept[0] + vectors
            return None
        kept = self._kept.pop(row, [])
        if kept:
            vectors = torch.cat([*kept, vectors]) if asked.by_token else kept[0] + vectors
        return vectors / asked.row.end if work.params.pooling == "mean" and not asked.by_token else vectors

    def _finish(self, params: PoolingParams, found: Sequence[tuple[int, Tensor]]) -> _Group:
        rows, sizes = tuple(row for row, _ in found), tuple(len(each) for _, each in found)
        return self._finished(params, rows, sizes, torch.cat([each for _, each in found]))

    def _finished(
        self, params: PoolingParams, rows: tuple[int, ...], sizes: tuple[int, ...], vectors: Tensor
    ) -> _Group:
        pooler, activate = self._model.pooler, bool(params.use_activation)
        if params.task.endswith("classify"):
            values = pooler.classify(vectors, activate=activate)
        else:
            values = pooler.embed(vectors)[:, : params.dimensions]
            values = functional.normalize(values, dim=1) if activate else values.contiguous()
        return _Group(rows, sizes, params.task.startswith("token_"), values)


def _are_alike(asked: Sequence[_Asked]) -> bool:
    """Return whether all rows are complete texts with one vector each and equal parameters."""
    first = asked[0].work.params
    if asked[0].by_token or first.label_token_ids:
        return False
    kind = _kind(first)

    def is_like_first(params: PoolingParams) -> bool:
        return params.pooling == first.pooling and not params.label_token_ids and _kind(params) == kind

    return all(
        each.row.start == 0 and each.work.is_last and ((params := each.work.params) is first or is_like_first(params))
        for each in asked
    )


def _kind(params: PoolingParams) -> PoolingParams:
    """Return the parameters that determine the computation after the vectors are summed, so that equal ones can be batched."""
    return PoolingParams(params.task, None, params.use_activation, params.dimensions)


def _joined(spans: Sequence[range], device: torch.device) -> Tensor:
    """Return the indices of all tokens of `spans`, in order, as a tensor [N] int64. Adjacent spans need no upload."""
    present = [span for span in spans if span]
    if all(before.stop == after.start for before, after in pairwise(present)):
        return torch.arange(present[0].start if present else 0, present[-1].stop if present else 0, device=device)
    return index_on(device, [token for span in present for token in span])


def _vectors(asked: Sequence[_Asked], states: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return for each row its token vectors [*, H] if it pools by token, else their sum [1, H]. The sum of no tokens is zero."""
    if any(each.by_token for each in asked):
        parts = zip(asked, states.split_with_sizes(list(sizes)), strict=True)
        return [part if each.by_token else part.sum(dim=0, keepdim=True) for each, part in parts]
    if all(size == 1 for size in sizes):
        return states.split_with_sizes([1] * len(sizes))
    lengths = index_on(states.device, sizes)
    sums: Tensor = torch.segment_reduce(states, "sum", lengths=lengths, axis=0, unsafe=True)
    return sums.split_with_sizes([1] * len(sizes))
