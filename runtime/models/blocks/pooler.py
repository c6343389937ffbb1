"""Pooler: computes an embedding or class scores from a pooled hidden state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

import ops
from runtime.models.blocks.norm import NormBlock, build_norm
from runtime.models.blocks.weights import Weights
from runtime.models.spec.pooler import Dense, PoolerSpec

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}  # a handful of rows each, so torch's own will do


class _DenseBlock:
    def __init__(self, dense: Dense, weights: Weights) -> None:
        self._linear: ops.LinearWeight = weights.linears[dense.linear.name]
        self._activation = _ACTIVATIONS[dense.activation]
        self._norm: NormBlock = build_norm(dense.norm, dense.norm_name, weights)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm.forward(self._activation(ops.linear(x, self._linear)))


class PoolerBlock:
    """Pooler of hidden states. `dtype`: dtype of activations, with which the matrices of `spec` are multiplied."""

    def __init__(self, spec: PoolerSpec, weights: Weights | None, dtype: torch.dtype) -> None:
        """Build the pooler. `weights` is None if `spec` has no weights."""
        self._dtype = dtype
        self._activation = spec.activation
        self._dense, self._head = (
            [] if weights is None else [_DenseBlock(each, weights) for each in dense]
            for dense in (spec.dense, spec.head)
        )

    def embed(self, x: Tensor) -> Tensor:
        """Return embeddings [P, D] float32, not normalised, for pooled hidden states x [P, H] float32."""
        return self._run(self._dense, x)

    def classify(self, x: Tensor, *, activate: bool) -> Tensor:
        """Return class scores [P, C] float32 for pooled hidden states x [P, H] float32; probabilities if `activate`."""
        scores = self._run(self._head, x)
        if activate and self._activation == "softmax":
            return scores.softmax(dim=1)
        return scores.sigmoid() if activate and self._activation == "sigmoid" else scores

    def _run(self, blocks: Sequence[_DenseBlock], x: Tensor) -> Tensor:
        if not blocks:
            return x
        x = x.to(self._dtype)
        for block in blocks:
            x = block.forward(x)
        return x.float()
