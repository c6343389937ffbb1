"""DecoderSpec: a model as data. Which blocks, of what shape, in which layer; no weights, no torch.

Blocks are frozen and compare by value, so layers may share what is derived from them. Parameters are named as Llama's
checkpoints name them; a family whose checkpoints differ says so in its rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from runtime.config import ELEMENT_BYTES
from runtime.kv.layout import LayerShape
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


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Turns the first `dim` of a head's dims, which is even. None scales nothing."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None


# --- blocks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix [out_features, in_features] at `name`.weight. `parts`: the rows of each matrix it may be merged from."""

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    parts: tuple[int, ...] = ()

    def parameters(self) -> Iterator[Parameter]:
        """The bias first: a linear layer is complete, and can be prepared, when its weight has come."""
        if self.bias:
            yield Parameter(f"{self.name}.bias", (self.out_features,), self.parts)
        yield Parameter(f"{self.name}.weight", (self.out_features, self.in_features), self.parts)


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over the whole context, grouped queries. `qk_norm`: RMS norm of each head's q and k before RoPE."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: Rope
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        return (
            Linear(f"{layer}.self_attn.qkv_proj", q + 2 * kv, hidden_size, self.qkv_bias, (q, kv, kv)),
            Linear(f"{layer}.self_attn.o_proj", hidden_size, q, self.output_bias),
        )

    def norms(self, layer: str) -> tuple[Parameter, ...]:
        names = ("q_norm", "k_norm") if self.qk_norm else ()
        return tuple(Parameter(f"{layer}.self_attn.{name}.weight", (self.head_size,)) for name in names)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    intermediate_size: int
    bias: bool = False

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        inner = self.intermediate_size
        return (
            Linear(f"{layer}.mlp.gate_up_proj", 2 * inner, hidden_size, self.bias, (inner, inner)),
            Linear(f"{layer}.mlp.down_proj", hidden_size, inner, self.bias),
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attention: Attention
    mlp: GatedMLP


# --- the model -----------------------------------------------------------------------------------------------------

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head"

LLAMA_RULES = (
    merge("q_proj k_proj v_proj", into="qkv_proj"),
    merge("gate_proj up_proj", into="gate_up_proj"),
)


def layer_name(index: int) -> str:
    return f"model.layers.{index}"


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """`max_model_len`: the longest context, in tokens, that the model was made for and this spec computes exactly.

    `tied_embedding`: the head is the embedding matrix. `rules` and `ignored` say how its checkpoints are written."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    tied_embedding: bool
    max_model_len: int
    rules: tuple[Rule, ...] = LLAMA_RULES
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)

    @property
    def head(self) -> Linear:
        return Linear(EMBEDDING if self.tied_embedding else HEAD, self.vocab_size, self.hidden_size)

    def linears(self) -> Iterator[Linear]:
        for index, layer in enumerate(self.layers):
            yield from layer.attention.linears(layer_name(index), self.hidden_size)
            yield from layer.mlp.linears(layer_name(index), self.hidden_size)
        yield self.head

    def parameters(self) -> Iterator[Parameter]:
        """All of them once, in the order of their use; the head, with a tied embedding, last."""
        if not self.tied_embedding:
            yield Parameter(f"{EMBEDDING}.weight", (self.vocab_size, self.hidden_size))
        for index, layer in enumerate(self.layers):
            name = layer_name(index)
            yield Parameter(f"{name}.input_layernorm.weight", (self.hidden_size,))
            for linear in layer.attention.linears(name, self.hidden_size):
                yield from linear.parameters()
            yield from layer.attention.norms(name)
            yield Parameter(f"{name}.post_attention_layernorm.weight", (self.hidden_size,))
            for linear in layer.mlp.linears(name, self.hidden_size):
                yield from linear.parameters()
        yield Parameter(FINAL_NORM, (self.hidden_size,))
        yield from self.head.parameters()

    def weights_bytes(self, dtype: str) -> int:
        """Of all parameters, stored as `dtype`."""
        return ELEMENT_BYTES[dtype] * sum(prod(parameter.shape) for parameter in self.parameters())

    def kv_shapes(self) -> tuple[LayerShape, ...]:
        return tuple(LayerShape(layer.attention.num_kv_heads, layer.attention.head_size) for layer in self.layers)
