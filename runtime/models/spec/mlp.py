"""MLPs: of two matrices, or of three, where one gates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from runtime.models.spec.linear import Linear
from runtime.weights.rules import Parameter


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"  # its approximation by a tanh
    RELU = "relu"
    RELU2 = "relu2"  # the square of relu


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), at `name` below its layer. What gate and down give is multiplied by numbers of their
    own. `down_bias`: whether down has a bias, where that is not as the others."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU
    name: str = "mlp"
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    down_bias: bool | None = None

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        inner, down_bias = self.intermediate_size, self.bias if self.down_bias is None else self.down_bias
        return (
            Linear(f"{layer}.{self.name}.gate_up_proj", 2 * inner, hidden_size, self.bias, (inner, inner)),
            Linear(f"{layer}.{self.name}.down_proj", hidden_size, inner, down_bias, reduce=True),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """down(activation(up(x))), at `name` below its layer."""

    intermediate_size: int
    bias: bool
    activation: Activation
    name: str = "mlp"

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        inner = self.intermediate_size
        return (
            Linear(f"{layer}.{self.name}.up_proj", inner, hidden_size, self.bias),
            Linear(f"{layer}.{self.name}.down_proj", hidden_size, inner, self.bias, reduce=True),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
