"""DecoderSpec: a model as data. Which blocks, of what shape, in which layer; no weights, no torch.

Blocks are frozen and compare by value, so layers may share what is derived from them. Parameters are named as Llama's
checkpoints name them; a family whose checkpoints differ says so in its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from math import prod
from typing import Literal, Protocol

from runtime.config import ELEMENT_BYTES
from runtime.kv.layout import LayerShape, MemoryShape, StateShape
from runtime.weights.rules import Parameter, Rule, WeightsError, merge


class UnsupportedModel(WeightsError):
    """The config asks for what is not implemented, or makes no sense."""


# --- rotary embedding ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """`attention_factor` multiplies cosines and sines."""

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each frequency divided by its own number; `dim / 2` of them."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency divided by its own number: one of `long` where contexts may pass `original_max_positions`, of `short`
    where they may not. `attention_factor` multiplies cosines and sines either way."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first `turned` pairs turn, as they would if all did; frequencies divided by `factor`."""

    turned: int
    factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Turns the first `dim` of a head's dims, which is even. None scales nothing."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None


# --- blocks --------------------------------------------------------------------------------------------------------
#
# A block names its weights below the `name` of its layer: `parameters` all of them, in the order of their use, `linears` the
# matrices among them that a kernel prepares.


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix [out_features, in_features] at `name`.weight. `parts`: the rows of each matrix it may be merged from.

    `stack` and `float32` as a `Parameter` has them."""

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    parts: tuple[int, ...] = ()
    stack: int = 0
    float32: bool = False

    def parameters(self) -> Iterator[Parameter]:
        """The bias first: a linear layer is complete, and can be prepared, when its weight has come."""
        if self.bias:
            yield Parameter(f"{self.name}.bias", (self.out_features,), self.parts, self.stack, self.float32)
        shape = (self.out_features, self.in_features)
        yield Parameter(f"{self.name}.weight", shape, self.parts, self.stack, self.float32)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    eps: float

    def parameters(self, name: str, *sizes: int) -> Iterator[Parameter]:
        """Of norms over vectors of these sizes, side by side."""
        yield Parameter(f"{name}.weight", (sum(sizes),), sizes)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, with either or neither of the two."""

    eps: float
    weight: bool = True
    bias: bool = True

    def parameters(self, name: str, *sizes: int) -> Iterator[Parameter]:
        if self.weight:
            yield Parameter(f"{name}.weight", (sum(sizes),), sizes)
        if self.bias:
            yield Parameter(f"{name}.bias", (sum(sizes),), sizes)


Norm = RMSNorm | LayerNorm


class Over(Enum):
    """Which vectors a norm of q and k is over, and how far its weights go."""

    HEAD = "each head, all with the same weights"
    EACH_HEAD = "each head, with weights of its own"
    ALL_HEADS = "all heads as one vector"


@dataclass(frozen=True, slots=True)
class QKNorm:
    """A norm of q and one of k, before they turn."""

    norm: Norm
    over: Over = Over.HEAD

    def parameters(self, name: str, num_heads: int, head_size: int) -> Iterator[Parameter]:
        yield from self.norm.parameters(name, *(head_size,) * (1 if self.over is Over.HEAD else num_heads))


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries are multiplied by 1 + beta * ln(1 + position // period), so that attention stays sharp in long contexts."""

    beta: float
    period: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over the paged context, grouped queries.

    `rope` None: q and k do not turn. `window`: a query sees itself and the `window - 1` tokens before it, None for all.
    Scores are q k^T * `scale`, then softcap * tanh(score / softcap) where `softcap` is given. `clip` bounds q, k
    and v as they come out of their projection, or out of norms over all heads. `sinks`: each head has a further score that
    takes its share of the softmax and adds nothing. `output_gate`: what heads give is multiplied by the sigmoid of a further
    projection, whose rows are between those of q and k."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: Rope | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None
    window: int | None = None
    softcap: float | None = None
    score_scale: float | None = None  # head_size ** -0.5 where None
    clip: float | None = None
    sinks: bool = False
    growth: QueryGrowth | None = None
    output_gate: bool = False

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5) if self.score_scale is None else self.score_scale

    @property
    def kv_shape(self) -> LayerShape:
        return LayerShape(self.num_kv_heads, self.head_size, window=self.window)

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        parts = (2 * q if self.output_gate else q, kv, kv)
        return (
            Linear(f"{layer}.self_attn.qkv_proj", sum(parts), hidden_size, self.qkv_bias, parts),
            Linear(f"{layer}.self_attn.o_proj", hidden_size, q, self.output_bias),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        if self.qk_norm is not None:
            yield from self.qk_norm.parameters(f"{layer}.self_attn.q_norm", self.num_heads, self.head_size)
            yield from self.qk_norm.parameters(f"{layer}.self_attn.k_norm", self.num_kv_heads, self.head_size)
        if self.sinks:
            yield Parameter(f"{layer}.self_attn.sinks", (self.num_heads,), float32=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, 2024): what is cached is one vector a token, a latent of `rank` dims and a key
    that turns; a matrix for each head makes a key of `key_size` dims and a value of `value_size` of the latent.

    As attention it has one kv head, of the size of that vector, whose values are the latents. `query_rank`: queries come out
    of a latent of their own, of so many dims; None for none. `norm`: of both latents. `bias`: of the projections into
    latents, and out of all heads."""

    rank: int
    key_size: int
    value_size: int
    norm: RMSNorm
    query_rank: int | None = None
    bias: bool = False

    @property
    def kv_shape(self) -> LayerShape:
        return LayerShape(self.num_kv_heads, self.head_size, latent=True, window=self.window)

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Into the latent, out of all heads, and one or two that make queries."""
        name, turned = f"{layer}.self_attn", self.head_size - self.rank
        queries, values = self.num_heads * (self.key_size + turned), self.num_heads * self.value_size
        ends = (
            Linear(f"{name}.kv_a_proj_with_mqa", self.head_size, hidden_size, self.bias),
            Linear(f"{name}.o_proj", hidden_size, values, self.bias),
        )
        if self.query_rank is None:
            return (*ends, Linear(f"{name}.q_proj", queries, hidden_size))
        return (
            *ends,
            Linear(f"{name}.q_a_proj", self.query_rank, hidden_size, self.bias),
            Linear(f"{name}.q_b_proj", queries, self.query_rank),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        name = f"{layer}.self_attn"
        if self.query_rank is not None:
            yield from self.norm.parameters(f"{name}.q_a_layernorm", self.query_rank)
        yield from self.norm.parameters(f"{name}.kv_a_layernorm", self.rank)
        rows = self.num_heads * (self.key_size + self.value_size)
        yield Parameter(f"{name}.kv_b_proj.weight", (rows, self.rank))


def _conv_parameters(name: str, channels: int, taps: int, bias: bool) -> Iterator[Parameter]:
    """Of a convolution over time, each channel by itself."""
    if bias:
        yield Parameter(f"{name}.bias", (channels,))
    yield Parameter(f"{name}.weight", (channels, 1, taps))


@dataclass(frozen=True, slots=True)
class Mamba2:
    """State space layer of heads (Dao and Gu 2024): its input is convolved over the last `taps` tokens, then `ops.ScanHeads`
    says what it remembers. `norm`: of the output, by group, after it is multiplied by silu of a gate. `bias`: of both
    projections."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    taps: int
    norm: RMSNorm
    bias: bool = False
    conv_bias: bool = True

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def channels(self) -> int:
        """That are convolved: of x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def kv_shape(self) -> StateShape:
        return StateShape(((self.taps - 1, self.channels), (self.num_heads, self.head_size, self.state_size)))

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Into gate, channels and steps; and out."""
        into = self.inner_size + self.channels + self.num_heads
        return (
            Linear(f"{layer}.mamba.in_proj", into, hidden_size, self.bias),
            Linear(f"{layer}.mamba.out_proj", hidden_size, self.inner_size, self.bias),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        yield from _conv_parameters(f"{layer}.mamba.conv1d", self.channels, self.taps, self.conv_bias)
        for name in ("A_log", "D", "dt_bias"):
            yield Parameter(f"{layer}.mamba.{name}", (self.num_heads,), float32=True)
        yield from self.norm.parameters(f"{layer}.mamba.norm", self.inner_size)


@dataclass(frozen=True, slots=True)
class Mamba:
    """State space layer of channels (Gu and Dao 2023), each with a state of `state_size` dims that forget at rates of their own.
    Steps come out of `rank` dims. `norm`: of those dims, of B and of C, each with weights of its own. `bias` of the
    projections in and out."""

    inner_size: int
    state_size: int
    rank: int
    taps: int
    norm: RMSNorm | None = None
    bias: bool = False
    conv_bias: bool = True

    @property
    def kv_shape(self) -> StateShape:
        return StateShape(((self.taps - 1, self.inner_size), (self.inner_size, self.state_size)))

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Into x and gate, out, into steps, B and C, and from few dims to steps."""
        name, inner = f"{layer}.mamba", self.inner_size
        return (
            Linear(f"{name}.in_proj", 2 * inner, hidden_size, self.bias),
            Linear(f"{name}.out_proj", hidden_size, inner, self.bias),
            Linear(f"{name}.x_proj", self.rank + 2 * self.state_size, inner),
            Linear(f"{name}.dt_proj", inner, self.rank, bias=True),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        name = f"{layer}.mamba"
        yield from _conv_parameters(f"{name}.conv1d", self.inner_size, self.taps, self.conv_bias)
        yield Parameter(f"{name}.A_log", (self.inner_size, self.state_size), float32=True)
        yield Parameter(f"{name}.D", (self.inner_size,), float32=True)
        if self.norm is not None:
            yield from self.norm.parameters(f"{name}.dt_layernorm", self.rank)
            yield from self.norm.parameters(f"{name}.b_layernorm", self.state_size)
            yield from self.norm.parameters(f"{name}.c_layernorm", self.state_size)


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule (Yang et al. 2024): q, k and v are convolved over the last `taps` tokens, then
    `ops.DeltaHeads` says what is remembered. `norm`: of each head's output, before it is multiplied by silu of a gate."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    taps: int
    norm: RMSNorm

    @property
    def inner_size(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def channels(self) -> int:
        """That are convolved: of q, k and v."""
        return 2 * self.num_key_heads * self.key_size + self.inner_size

    @property
    def kv_shape(self) -> StateShape:
        return StateShape(((self.taps - 1, self.channels), (self.num_value_heads, self.key_size, self.value_size)))

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Into q, k, v and gate, out, and into what two rates of each head are made of."""
        name, sizes = f"{layer}.linear_attn", (self.channels, self.inner_size)
        return (
            Linear(f"{name}.in_proj_qkvz", sum(sizes), hidden_size, parts=sizes),
            Linear(f"{name}.out_proj", hidden_size, self.inner_size),
            Linear(f"{name}.in_proj_ba", 2 * self.num_value_heads, hidden_size, parts=(self.num_value_heads,) * 2),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        name = f"{layer}.linear_attn"
        yield from _conv_parameters(f"{name}.conv1d", self.channels, self.taps, bias=False)
        for each in ("A_log", "dt_bias"):
            yield Parameter(f"{name}.{each}", (self.num_value_heads,), float32=True)
        yield from self.norm.parameters(f"{name}.norm", self.value_size)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """c * conv(b * x), where b, c and x are projections of the input and the convolution is over the last `taps` tokens."""

    taps: int
    size: int
    bias: bool = False

    @property
    def kv_shape(self) -> StateShape:
        return StateShape(((self.taps - 1, self.size),))

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Into b, c and x; and out."""
        return (
            Linear(f"{layer}.conv.in_proj", 3 * self.size, hidden_size, self.bias),
            Linear(f"{layer}.conv.out_proj", hidden_size, self.size, self.bias),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        yield from _conv_parameters(f"{layer}.conv.conv", self.size, self.taps, self.bias)


Recurrent = Mamba2 | Mamba | GatedDeltaNet | ShortConv


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"  # its approximation by a tanh
    RELU = "relu"
    RELU2 = "relu2"  # the square of relu


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), at `name` below its layer."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU
    name: str = "mlp"

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        inner = self.intermediate_size
        return (
            Linear(f"{layer}.{self.name}.gate_up_proj", 2 * inner, hidden_size, self.bias, (inner, inner)),
            Linear(f"{layer}.{self.name}.down_proj", hidden_size, inner, self.bias),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """down(activation(up(x)))."""

    intermediate_size: int
    bias: bool
    activation: Activation

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        inner = self.intermediate_size
        return (
            Linear(f"{layer}.mlp.up_proj", inner, hidden_size, self.bias),
            Linear(f"{layer}.mlp.down_proj", hidden_size, inner, self.bias),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a token takes, and with which weights: `ops.Routing`, which says what the rules mean.

    `correction`: a bias for each expert's score that only choosing sees. `float32`: the router computes in that precision
    whatever the model's."""

    top_k: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    least_sum: float = 1e-20
    jitter: float = 0.0
    bias: bool = False
    correction: bool = False
    float32: bool = False


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), after gate <= limit and -limit <= up <= limit."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs of one shape, numbered below `name`. `activation` None: silu(gate) * up."""

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    bias: bool
    activation: ClampedSwiglu | None

    def halves(self, expert: int) -> tuple[Linear, Linear]:
        """gate_up and down of one of them."""
        name, inner, stack = f"{self.name}.{expert}", self.intermediate_size, self.num_experts
        return (
            Linear(f"{name}.gate_up", 2 * inner, self.hidden_size, self.bias, (inner, inner), stack),
            Linear(f"{name}.down", self.hidden_size, inner, self.bias, stack=stack),
        )

    def parameters(self) -> Iterator[Parameter]:
        for expert in range(self.num_experts):
            for half in self.halves(expert):
                yield from half.parameters()


@dataclass(frozen=True, slots=True)
class MoE:
    """The experts that the router chooses for each token, by weight, plus `shared`, which every token takes.

    `shared_gate`: what `shared` gives is multiplied by the sigmoid of a linear layer with one output."""

    num_experts: int
    intermediate_size: int
    router: Router
    shared: GatedMLP | None = None
    shared_gate: bool = False
    bias: bool = False
    activation: ClampedSwiglu | None = None

    def experts(self, layer: str, hidden_size: int) -> Experts:
        return Experts(
            f"{layer}.mlp.experts", self.num_experts, hidden_size, self.intermediate_size, self.bias, self.activation
        )

    def router_linear(self, layer: str, hidden_size: int) -> Linear:
        router = self.router
        return Linear(f"{layer}.mlp.gate", self.num_experts, hidden_size, router.bias, float32=router.float32)

    def shared_gate_linear(self, layer: str, hidden_size: int) -> Linear:
        return Linear(f"{layer}.mlp.shared_expert_gate", 1, hidden_size)

    def correction_name(self, layer: str) -> str:
        return f"{layer}.mlp.gate.e_score_correction_bias"

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """But for those of the experts."""
        shared = () if self.shared is None else self.shared.linears(layer, hidden_size)
        gate = (self.shared_gate_linear(layer, hidden_size),) if self.shared_gate else ()
        return (self.router_linear(layer, hidden_size), *shared, *gate)

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        if self.router.correction:
            yield Parameter(self.correction_name(layer), (self.num_experts,), float32=True)
        yield from self.experts(layer, hidden_size).parameters()


MLP = GatedMLP | PlainMLP | MoE
Block = Attention | Recurrent | MLP


# --- layers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): norms `before` the two blocks, `after` them, or both.

    The pairs hold the norms' names. What a block adds is first multiplied by `multiplier`."""

    attention: Attention
    mlp: MLP
    norm: Norm
    before: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    multiplier: float = 1.0

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.attention, self.mlp)

    @property
    def kv_shape(self) -> LayerShape:
        return self.attention.kv_shape

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        for index, block in enumerate(self.blocks):
            if self.before is not None:
                yield from self.norm.parameters(f"{name}.{self.before[index]}", hidden_size)
            yield from block.parameters(name, hidden_size)
            if self.after is not None:
                yield from self.norm.parameters(f"{name}.{self.after[index]}", hidden_size)


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """x + attention(norm(x)) + mlp(norm(x)). `norms`: the name of the one before both, or of one for each."""

    attention: Attention
    mlp: MLP
    norm: Norm
    norms: tuple[str] | tuple[str, str] = ("input_layernorm",)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.attention, self.mlp)

    @property
    def kv_shape(self) -> LayerShape:
        return self.attention.kv_shape

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        for norm in self.norms:
            yield from self.norm.parameters(f"{name}.{norm}", hidden_size)
        yield from self.attention.parameters(name, hidden_size)
        yield from self.mlp.parameters(name, hidden_size)


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """As a `Layer` with norms before both of its blocks, but with something recurrent in place of attention."""

    mixer: Recurrent
    mlp: MLP
    norm: Norm
    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    multiplier: float = 1.0

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.mixer, self.mlp)

    @property
    def kv_shape(self) -> StateShape:
        return self.mixer.kv_shape

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        for norm, block in zip(self.before, self.blocks, strict=True):
            yield from self.norm.parameters(f"{name}.{norm}", hidden_size)
            yield from block.parameters(name, hidden_size)


@dataclass(frozen=True, slots=True)
class SingleLayer:
    """x + block(norm(x)): a layer of nothing else."""

    block: Block
    norm: Norm

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.block,)

    @property
    def kv_shape(self) -> MemoryShape | None:
        return None if isinstance(self.block, MLP) else self.block.kv_shape

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        yield from self.norm.parameters(f"{name}.norm", hidden_size)
        yield from self.block.parameters(name, hidden_size)


AttentionLayer = Layer | ParallelLayer
AnyLayer = AttentionLayer | RecurrentLayer | SingleLayer


# --- the model -----------------------------------------------------------------------------------------------------


class ModelSpec(Protocol):
    """A model before its weights are read, whoever will compute it. `max_model_len`: the longest context it was made for."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...

    def weights_bytes(self, dtype: str) -> int:
        """Of all parameters, stored as `dtype`."""
        ...

    def kv_shapes(self) -> tuple[MemoryShape | None, ...]:
        """What each layer remembers, in the order of a forward pass."""
        ...


EMBEDDING = "model.embed_tokens"
POSITIONS = "model.embed_positions"
FINAL_NORM = "model.norm"
HEAD = "lm_head"

LLAMA_RULES = (
    merge("q_proj k_proj v_proj", into="qkv_proj"),
    merge("gate_proj up_proj", into="gate_up_proj"),
)


def layer_name(index: int) -> str:
    return f"model.layers.{index}"


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A vector for each position, added to the embedding; position p has row p + `offset` of `rows`."""

    rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """`max_model_len`: the longest context, in tokens, that the model was made for and this spec computes exactly.

    `norm`: of the last layer's output. `tied_embedding`: the head is the embedding matrix. Embeddings are multiplied by
    `embedding_multiplier`, logits by `logit_scale`, and then softcap * tanh(logit / softcap) is taken of them where
    `logit_softcap` is given. `rules`, `ignored` and `ignored_below` say how its checkpoints are written, `other_rules` how else
    they may be."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[AnyLayer, ...]
    norm: Norm
    tied_embedding: bool
    max_model_len: int
    positions: LearnedPositions | None = None
    embedding_multiplier: float = 1.0
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    rules: tuple[Rule, ...] = LLAMA_RULES
    other_rules: tuple[tuple[Rule, ...], ...] = ()
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    ignored_below: tuple[str, ...] = ()

    def with_layers(self, change: Callable[[int, AttentionLayer], AnyLayer]) -> DecoderSpec:
        """The same with each layer that has attention, by index, changed."""
        layers = (
            change(index, layer) if isinstance(layer, AttentionLayer) else layer
            for index, layer in enumerate(self.layers)
        )
        return replace(self, layers=tuple(layers))

    @property
    def attention(self) -> Attention:
        """Of the first layer that has it."""
        return next(block for _, block in self.blocks() if isinstance(block, Attention))

    @property
    def head(self) -> Linear:
        return Linear(EMBEDDING if self.tied_embedding else HEAD, self.vocab_size, self.hidden_size, self.head_bias)

    def linears(self) -> Iterator[Linear]:
        for name, block in self.blocks():
            yield from block.linears(name, self.hidden_size)
        yield self.head

    def experts(self) -> Iterator[Experts]:
        for name, block in self.blocks():
            if isinstance(block, MoE):
                yield block.experts(name, self.hidden_size)

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """With the names of their layers."""
        for index, layer in enumerate(self.layers):
            yield from ((layer_name(index), block) for block in layer.blocks)

    def parameters(self) -> Iterator[Parameter]:
        """All of them once, in the order of their use; the head, with a tied embedding, last."""
        if not self.tied_embedding:
            yield Parameter(f"{EMBEDDING}.weight", (self.vocab_size, self.hidden_size))
        if self.positions is not None:
            yield Parameter(f"{POSITIONS}.weight", (self.positions.rows, self.hidden_size))
        for index, layer in enumerate(self.layers):
            yield from layer.parameters(layer_name(index), self.hidden_size)
        yield from self.norm.parameters(FINAL_NORM, self.hidden_size)
        yield from self.head.parameters()

    def weights_bytes(self, dtype: str) -> int:
        """Of all parameters, stored as `dtype`."""
        return ELEMENT_BYTES[dtype] * sum(prod(parameter.shape) for parameter in self.parameters())

    def kv_shapes(self) -> tuple[MemoryShape | None, ...]:
        """What each layer remembers, None for nothing."""
        return tuple(layer.kv_shape for layer in self.layers)
