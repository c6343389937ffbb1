"""Several shards of a model as one, on one machine: each is a decoder on a thread of its own, and sums over them are taken by hand,
in the order of their ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import ops
from runtime.models.blocks.weights import Weights
from runtime.models.decoder import Decoder
from runtime.models.load import opened, read_weights
from runtime.models.spec.decoder import EMBEDDING
from runtime.models.spec.sharding import sharded

TIMEOUT_S = 120.0  # of a rank that waits for one that failed


class Group:
    """A meeting of `size` threads; `rank` is known to each by itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._given: list[Tensor | None] = [None] * size
        self._local = threading.local()

    def run(self, work: Callable[[int], object]) -> list[object]:
        """work(rank) of all ranks at once."""

        def of_rank(rank: int) -> object:
            self._local.rank = rank
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(of_rank, range(self.size)))

    @property
    def rank(self) -> int:
        return self._local.rank

    def gather(self, x: Tensor) -> list[Tensor]:
        self._given[self.rank] = x
        self._barrier.wait()
        every = [each for each in self._given if each is not None]
        assert len(every) == self.size
        self._barrier.wait()
        return every

    def sum(self, x: Tensor) -> Tensor:
        first, *others = self.gather(x)
        return sum(others, first)


class Summed(ops.LinearWeight):
    """Of inputs shared out by columns."""

    def __init__(self, part: ops.LinearWeight, group: Group) -> None:
        self.out_features, self.in_features, self.nbytes = part.out_features, part.in_features, part.nbytes
        self._part, self._group = part, group

    def matmul(self, x: Tensor) -> Tensor:
        return self._group.sum(ops.linear(x, self._part))

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError

    def refill(self, stored: ops.Stored) -> bool:
        raise AssertionError


class Vocabulary(Summed):
    """Of rows shared out."""

    def matmul(self, x: Tensor) -> Tensor:
        return torch.cat(self._group.gather(ops.linear(x, self._part)), dim=1)

    def rows(self, ids: Tensor) -> Tensor:
        own = ids - self._group.rank * self.out_features
        elsewhere = (own < 0) | (own >= self.out_features)
        return self._group.sum(
            ops.embedding(own.masked_fill(elsewhere, 0), self._part).masked_fill(elsewhere[:, None], 0)
        )


class SummedExperts(ops.ExpertWeights):
    def __init__(self, part: ops.ExpertWeights, group: Group) -> None:
        self.shape, self.nbytes = part.shape, part.nbytes
        self._part, self._group = part, group

    def fill(self, *_) -> None:
        raise AssertionError

    def mix(self, x, logits, routing, correction, plus) -> Tensor:
        mixed = self._group.sum(self._part.mix(x, logits, routing, correction, None))
        return mixed if plus is None else mixed + plus


def load_shard(spec, files, rank: int, size: int, group: Group, policy=None) -> Decoder:
    part = sharded(spec, rank, size)
    options = {"dtype": "float32", "load_format": "auto", "seed": 0, "device": "cpu", "policy": policy}
    with opened(part, files, **options) as reader:
        weights = read_weights(part, reader, dtype="float32", device="cpu", progress=lambda progress: None)
    return Decoder.build(part, together(part, weights, group), dtype="float32", device="cpu", max_positions=128)


def together(part, weights: Weights, group: Group) -> Weights:
    """What the spec says is a part of a sum, summed; the vocabulary put together."""
    linears = dict(weights.linears)
    for linear in part.linears():
        if linear.reduce:
            linears[linear.name] = Summed(linears[linear.name], group)
    table = weights.tensors.get(f"{EMBEDDING}.weight")
    if table is not None:
        linears[EMBEDDING] = ops.prepare_linear(ops.StoredWeight.dense(table))
    for name in {part.head.name, EMBEDDING}:
        linears[name] = Vocabulary(linears[name], group)
    assert all(each.halves(0)[1].reduce for each in part.experts())
    experts = {name: SummedExperts(each, group) for name, each in weights.experts.items()}
    return weights._replace(linears=linears, experts=experts)


def all_alike(values: Sequence[Tensor]) -> bool:
    return all(torch.equal(each, values[0]) for each in values)
