"""Tensor parallel weights: each rank multiplies by its part of a weight, and an all-reduce or all-gather combines the outputs."""

from __future__ import annotations

from torch import Tensor

import ops
from ops.moe.weights import Beside, Half
from ops.symbols import NotTraceable, Symbol
from runtime.models.blocks.weights import Weights
from runtime.models.spec.decoder import EMBEDDING, DecoderSpec
from runtime.models.spec.sharding import deferred_sums, reduced_linears
from runtime.parallel.group import Peers


def put_together(spec: DecoderSpec, weights: Weights, peers: Peers) -> Weights:
    """Return a shard's `weights` wrapped so that each combines its outputs over all ranks. Blocks then compute the whole model's
    results."""
    tensors, linears = dict(weights.tensors), dict(weights.linears)
    deferred = deferred_sums(spec)
    for name in reduced_linears(spec):
        if name not in deferred.parts:
            linears[name] = SummedLinear(linears[name], peers)
    table = tensors.pop(f"{EMBEDDING}.weight", None)
    if spec.generates:
        linears[spec.head.name] = SharedRows(linears[spec.head.name], peers)
    is_head = spec.generates and spec.head.name == EMBEDDING
    if spec.has_embedding and not is_head:
        linears[EMBEDDING] = SharedRows(
            linears[EMBEDDING] if table is None else ops.prepare_linear(_dense(table)), peers
        )
    experts = dict(weights.experts)
    for name in experts.keys() - deferred.parts:
        experts[name] = SummedExperts(experts[name], peers)
    sums = dict.fromkeys(deferred.norms, peers)
    return weights._replace(linears=linears, tensors=tensors, experts=experts, sums=sums)


def _dense(table: Tensor) -> ops.StoredWeight:
    return ops.StoredWeight.dense(table)


class _Part(ops.LinearWeight):
    def __init__(self, part: ops.LinearWeight, peers: Peers) -> None:
        self.out_features, self.in_features, self.nbytes = part.out_features, part.in_features, part.nbytes
        self._part, self._peers = part, peers

    def of(self, adapters: ops.TokenAdapters | None) -> _Part:
        return self if adapters is None else type(self)(self._part.of(adapters), self._peers)

    def refill(self, stored: ops.Stored) -> bool:
        return self._part.refill(stored)

    def _own(self, x: Tensor) -> Tensor:
        if isinstance(x, Symbol):
            raise NotTraceable("a layer whose sums are taken over several devices")
        return ops.linear(x, self._part)


class SummedLinear(_Part):
    """Linear layer whose columns are split over ranks. The outputs of all ranks are summed. Only the first rank adds the bias."""

    def matmul(self, x: Tensor) -> Tensor:
        """Return the sum over ranks [T, out_features]. x [T, in_features] contains the columns of this rank."""
        return self._peers.sum(self._own(x))

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("an embedding cannot be split by columns")


class SharedRows(_Part):
    """Embedding or head whose rows, one per token id, are split over ranks."""

    def matmul(self, x: Tensor) -> Tensor:
        """Return the logits of all ranks [T, ranks * out_features], concatenated, for x [T, in_features]."""
        return self._peers.concat(self._own(x))

    def rows(self, ids: Tensor) -> Tensor:
        own = ids - self._peers.number * self.out_features
        elsewhere = (own < 0) | (own >= self.out_features)
        rows = ops.embedding(own.masked_fill(elsewhere, 0), self._part)
        return self._peers.sum(rows.masked_fill(elsewhere[:, None], 0))


class SummedExperts(ops.ExpertWeights):
    """Experts whose inner columns are split over ranks. Outputs are summed over ranks, together with everything added to them
    before."""

    def __init__(self, part: ops.ExpertWeights, peers: Peers) -> None:
        self.shape = part.shape
        self._part, self._peers = part, peers

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._part.nbytes

    def of(self, adapters: ops.TokenAdapters | None) -> SummedExperts:
        return self if adapters is None else SummedExperts(self._part.of(adapters), self._peers)

    def fill(self, half: Half, expert: int, stored: ops.Stored) -> None:
        self._part.fill(half, expert, stored)

    def mix(
        self,
        x: Tensor,
        logits: Tensor,
        routing: ops.Routing,
        e_score_correction_bias: Tensor | None,
        plus: Tensor | None,
        beside: Beside | None = None,
    ) -> Tensor:
        assert beside is None, "adapters are added to each part of the sum"
        if isinstance(x, Symbol):
            raise NotTraceable("experts whose sums are taken over several devices")
        return self._peers.sum(self._part.mix(x, logits, routing, e_score_correction_bias, plus))
