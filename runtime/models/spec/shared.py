"""Shared transformers (Zamba 2, 2024): attention and an MLP with the same weights in several layers, and adapters of each layer's
own beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from runtime.models.spec.attention import Attention
from runtime.models.spec.linear import Linear
from runtime.models.spec.mlp import GatedMLP
from runtime.models.spec.norm import RMSNorm
from runtime.weights.rules import Parameter

Adapter = tuple[
    Linear, Linear
]  # what the first gives goes into the second, which adds to a larger matrix of the same input


@dataclass(frozen=True, slots=True)
class SharedTransformer:
    """linear(mlp(norm(attention(norm(x and the embedding, side by side))))), without residuals.

    `name`: under which the shared weights are stored, all but those of `linear`. `user`: the number of this layer among those
    that share them, which its adapters, of `rank` dims, are numbered by. The MLP has one; `adapts_attention`: so have q, k and
    v each."""

    name: str
    attention: Attention
    mlp: GatedMLP
    norm: RMSNorm
    rank: int
    user: int
    adapts_attention: bool

    def shared_linears(self, hidden_size: int) -> tuple[Linear, ...]:
        qkv, output = self.attention.linears(self.name, hidden_size)
        return (replace(qkv, in_features=2 * hidden_size), output, *self.mlp.linears(self.name, hidden_size))

    def linear(self, layer: str, hidden_size: int) -> Linear:
        return Linear(f"{layer}.linear", hidden_size, hidden_size)

    def attention_adapters(self, hidden_size: int) -> tuple[Adapter, ...]:
        """Adapters of q, k and v."""
        if not self.adapts_attention:
            return ()
        size = self.attention.num_heads * self.attention.head_size
        names = (f"{self.name}.self_attn.linear_{each}_adapter_list" for each in "qkv")
        return tuple(self._adapter(name, size, 2 * hidden_size) for name in names)

    def mlp_adapter(self, hidden_size: int) -> Adapter:
        name = f"{self.name}.{self.mlp.name}.gate_up_proj_adapter_list"
        return self._adapter(name, 2 * self.mlp.intermediate_size, hidden_size)

    def _adapter(self, name: str, out_features: int, in_features: int) -> Adapter:
        first = Linear(f"{name}.{self.user}.0", self.rank, in_features)
        return first, Linear(f"{name}.{self.user}.1", out_features, self.rank)

    def linears(self, layer: str, hidden_size: int) -> Iterator[Linear]:
        yield from self.shared_linears(hidden_size)
        for adapter in (*self.attention_adapters(hidden_size), self.mlp_adapter(hidden_size)):
            yield from adapter
        yield self.linear(layer, hidden_size)

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        yield from self.norm.parameters(f"{self.name}.input_layernorm", 2 * hidden_size)
        yield from self.norm.parameters(f"{self.name}.pre_ff_layernorm", hidden_size)
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
