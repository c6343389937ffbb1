"""Specs of blocks that process each token separately: MLPs of two matrices, gated MLPs of three, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from runtime.models.spec.linear import Linear
from runtime.weights.rules import Parameter


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"  # tanh approximation of GELU
    RELU = "relu"
    RELU2 = "relu2"  # square of ReLU


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """MLP that computes down(activation(gate(x)) * up(x)). `name`: its name in the layer. `gate_multiplier`, `down_multiplier`:
    factors of the outputs of gate and down. `down_bias`: whether down has a bias; None means the same as `bias`."""

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
    """MLP that computes down(activation(up(x))). `name`: its name in the layer."""

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


@dataclass(frozen=True, slots=True)
class Router:
    """Router of experts: selects a token's experts and their weights (`ops.Routing` explains the rules).

    `e_score_correction_bias`: a bias per expert that affects only the selection. `float32`: the router computes in float32."""

    top_k: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "top-2 sum"] = "best"
    min_sum: float = 1e-20
    jitter: float = 0.0
    bias: bool = False
    e_score_correction_bias: bool = False
    float32: bool = False


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """Activation (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and -limit <= up <= limit."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Latent:
    """Smaller vector space of `size` dims for experts, with a projection into it and one out of it, which may have a bias."""

    size: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a layer: MLPs of one shape, gated or plain, numbered below `name`. If they are only some of the layer's
    `num_routed` experts, `numbers` are their numbers in the checkpoint. In the router's order they are `first` and the following
    ones."""

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    bias: bool
    activation: Activation | ClampedSwiglu
    gated: bool
    numbers: tuple[int, ...] = ()
    first: int = 0
    num_routed: int = 0

    def halves(self, expert: int) -> tuple[Linear, Linear]:
        """Return the two linear layers of expert number `expert`: gate and up merged (or up if there is no gate), and down."""
        number = self.numbers[expert] if self.numbers else expert
        name, inner, stack = f"{self.name}.{number}", self.intermediate_size, self.num_routed or self.num_experts
        down = Linear(f"{name}.down", self.hidden_size, inner, self.bias, stack=stack, reduce=True)
        if not self.gated:
            return Linear(f"{name}.up", inner, self.hidden_size, self.bias, stack=stack), down
        return Linear(f"{name}.gate_up", 2 * inner, self.hidden_size, self.bias, (inner, inner), stack), down

    def parameters(self) -> Iterator[Parameter]:
        for expert in range(self.num_experts):
            for half in self.halves(expert):
                yield from half.parameters()


@dataclass(frozen=True, slots=True)
class MoE:
    """Mixture of experts: the weighted sum of the experts that the router selects for each token, plus the MLP `shared` for every
    token.

    `weighs_input`: a token has one expert; its input is multiplied by the sigmoid of the expert's logit, and its output has no
    weight (Llama 4, 2025). `shared_gate`: the output of `shared` is multiplied by the sigmoid of a linear layer with one output.
    `bias`, `activation`, `gated`: properties of the experts. `latent`: smaller vector space in which the experts compute.
    `order`: checkpoint numbers of the experts in the router's order, of which this device has `num_held` from index `first` on.
    If `order` is empty, it has all, in the checkpoint's order."""

    num_experts: int
    intermediate_size: int
    router: Router
    shared: GatedMLP | PlainMLP | None = None
    shared_gate: bool = False
    bias: bool = False
    activation: Activation | ClampedSwiglu = Activation.SILU
    gated: bool = True
    latent: Latent | None = None
    weighs_input: bool = False
    order: tuple[int, ...] = ()
    first: int = 0
    num_held: int = 0

    def experts(self, layer: str, hidden_size: int) -> Experts:
        experts = Experts(
            f"{layer}.mlp.experts", self.num_experts, self.latent.size if self.latent else hidden_size,
            self.intermediate_size, self.bias, self.activation, self.gated,
        )  # fmt: skip
        if not self.order:
            return experts
        held = self.order[self.first : self.first + self.num_held]
        return replace(experts, num_experts=self.num_held, numbers=held, first=self.first, num_routed=self.num_experts)

    def latent_linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Return the projections to and from the experts' latent space; none if they have no latent space."""
        if self.latent is None:
            return ()
        size, bias = self.latent.size, self.latent.bias
        return (
            Linear(f"{layer}.mlp.latent_in", size, hidden_size, bias),
            Linear(f"{layer}.mlp.latent_out", hidden_size, size, bias),
        )

    def router_linear(self, layer: str, hidden_size: int) -> Linear:
        router = self.router
        return Linear(f"{layer}.mlp.gate", self.num_experts, hidden_size, router.bias, float32=router.float32)

    def shared_gate_linear(self, layer: str, hidden_size: int) -> Linear:
        return Linear(f"{layer}.mlp.shared_expert_gate", 1, hidden_size)

    def correction_bias_name(self, layer: str) -> str:
        return f"{layer}.mlp.gate.e_score_correction_bias"

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Return all linear layers except those of the experts."""
        shared = () if self.shared is None else self.shared.linears(layer, hidden_size)
        gate = (self.shared_gate_linear(layer, hidden_size),) if self.shared_gate else ()
        return (self.router_linear(layer, hidden_size), *shared, *gate, *self.latent_linears(layer, hidden_size))

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        if self.router.e_score_correction_bias:
            yield Parameter(self.correction_bias_name(layer), (self.num_experts,), float32=True)
        yield from self.experts(layer, hidden_size).parameters()
