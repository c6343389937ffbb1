"""Pooler: computes embeddings and class scores from a model's final hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from runtime.api import PoolerInfo, SequencePooling
from runtime.models.spec.linear import Linear
from runtime.models.spec.norm import NoNorm, Norm
from runtime.weights.rules import Parameter

_NO_NORM = NoNorm()
PoolerActivation = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "silu", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Dense:
    """Layer of a pooler that computes norm(activation(linear(x))). `norm_name`: name of the norm's weights."""

    linear: Linear
    activation: PoolerActivation = "identity"
    norm: Norm = _NO_NORM
    norm_name: str = ""

    def parameters(self) -> Iterator[Parameter]:
        yield from self.linear.parameters()
        yield from self.norm.parameters(self.norm_name, self.linear.out_features)


@dataclass(frozen=True, slots=True)
class PoolerSpec:
    """Pooling of a model's hidden states to embeddings and class scores.

    `pooling`, `normalize`: defaults for embeddings; the layers `dense` are between both. `head`: layers that compute class
    scores after pooling, or for each token if `labels_tokens`. They have one output per entry of `labels`; `activation` converts
    outputs to probabilities. `matryoshka_dimensions`, `label_token_ids`: see `PoolerInfo`."""

    pooling: SequencePooling = "last"
    normalize: bool = True
    matryoshka_dimensions: tuple[int, ...] | None = None
    dense: tuple[Dense, ...] = ()
    head: tuple[Dense, ...] = ()
    labels: tuple[str, ...] = ()
    labels_tokens: bool = False
    activation: Literal["softmax", "sigmoid", "none"] = "none"
    label_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.labels) != (self.head[-1].linear.out_features if self.head else 0):
            raise ValueError(f"{len(self.labels)} labels for a head of other classes")

    def linears(self) -> Iterator[Linear]:
        yield from (each.linear for each in (*self.dense, *self.head))

    def parameters(self) -> Iterator[Parameter]:
        for each in (*self.dense, *self.head):
            yield from each.parameters()

    def info(self, hidden_size: int, num_token_types: int = 0) -> PoolerInfo:
        """Return the pooler's properties that the server needs."""
        return PoolerInfo(
            embedding_size=self.dense[-1].linear.out_features if self.dense else hidden_size,
            pooling=self.pooling,
            normalize=self.normalize,
            matryoshka_dimensions=self.matryoshka_dimensions,
            labels=self.labels,
            labels_tokens=self.labels_tokens,
            activation=self.activation,
            num_token_types=num_token_types,
            label_token_ids=self.label_token_ids,
        )


POOLS_LAST = PoolerSpec()  # default of causal models, where only the last token attends to all others
