"""Specs of attention over the paged KV cache, which contains keys and values of each head, or one latent vector per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from runtime.kv.kinds import AttentionKVSpec, Chunk, Cross, Full, MemoryKind, Nothing, PromptFull, PromptWindow, Window
from runtime.models.spec.linear import Linear
from runtime.models.spec.norm import Norm, RMSNorm
from runtime.models.spec.rope import Rope
from runtime.weights.rules import Parameter


class Mask(Enum):
    """Attention mask: the keys that a query attends to. The values are the names used by `ops`."""

    CAUSAL = "causal"
    FULL = "full"  # all of its sequence, which is computed in one step and needs no KV cache
    PREFIX_FULL = "prefix_full"  # causal, but all tokens of a prompt attend to each other


class NormScope(Enum):
    """Scope of a norm of q and k: over each head or over all heads, with shared or separate weights."""

    HEAD = "each head, all with the same weights"
    EACH_HEAD = "each head, with weights of its own"
    ALL_HEADS = "all heads as one vector"


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Norm of q and of k, applied before the rotary embedding."""

    norm: Norm
    over: NormScope = NormScope.HEAD

    def parameters(self, name: str, num_heads: int, head_size: int) -> Iterator[Parameter]:
        yield from self.norm.parameters(name, *(head_size,) * (1 if self.over is NormScope.HEAD else num_heads))


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """Scaling of queries by 1 + beta * ln(1 + (position + offset) // period), which keeps attention sharp in long contexts."""

    beta: float
    period: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """Relative position bias (T5, Raffel et al. 2020): a learned bias per head and distance, which is added to the scores. There
    are `num_buckets` biases, half for each direction. Large distances share a bucket, as do all distances from `max_distance` on.

    `name`: name of the matrix [num_buckets, num_heads], which several layers may use."""

    num_buckets: int
    max_distance: int
    name: str


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the paged KV cache. `mask`: keys that a query attends to.

    `rope`: None means no rotary embedding. `window`: a query attends to itself and the `window - 1` tokens before it, and to later
    tokens if `mask` allows; None means no limit. `chunk`: the context is divided into chunks of `chunk` tokens, and a query attends
    to tokens of its own chunk only. `input_size`: input width, if it is not the hidden size.

    Scores are q k^T * `scale`, then softcap * tanh(score / softcap) if `softcap` is set. `clip` bounds q, k and v after the
    projection, or after norms over all heads. `sinks`: each head has an extra score that takes part in the softmax and
    contributes no value. `alibi`: slope of each head; a score is reduced by slope * distance in tokens. `output_gate`: the
    output is multiplied by the sigmoid of an extra projection, whose rows are between those of q and k."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: Rope | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    score_scale: float | None = None  # head_size ** -0.5 where None
    clip: float | None = None
    sinks: bool = False
    growth: AttentionTemperature | None = None
    output_gate: bool = False
    alibi: tuple[float, ...] | None = None
    mask: Mask = Mask.CAUSAL
    relative_bias: RelativeBias | None = None
    input_size: int | None = None
    latent: ClassVar[bool] = False  # values are part of the keys

    def __post_init__(self) -> None:
        if self.mask is not Mask.CAUSAL and (self.alibi is not None or self.latent):
            raise ValueError(f"no kernel has a {self.mask.value} mask with linear biases or latent keys")
        if self.chunk is not None and (self.mask is not Mask.CAUSAL or self.window is not None or self.latent):
            raise ValueError("chunks are for causal attention without windows or latent keys")
        if self.relative_bias is not None and self.mask is not Mask.FULL:
            raise ValueError("relative biases are for attention without a cache")

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5) if self.score_scale is None else self.score_scale

    @property
    def memory_kind(self) -> MemoryKind:
        if self.mask is Mask.FULL:
            return Nothing()
        kv = AttentionKVSpec(self.num_kv_heads, self.head_size, self.latent)
        if self.mask is Mask.PREFIX_FULL:
            return PromptFull(kv) if self.window is None else PromptWindow(kv, self.window)
        if self.chunk is not None:
            return Chunk(kv, self.chunk)
        return Full(kv) if self.window is None else Window(kv, self.window)

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        parts = (2 * q if self.output_gate else q, kv, kv)
        return (
            Linear(f"{layer}.self_attn.qkv_proj", sum(parts), self.input_size or hidden_size, self.qkv_bias, parts),
            Linear(f"{layer}.self_attn.o_proj", hidden_size, q, self.output_bias, reduce=True),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()
        if self.qk_norm is not None:
            yield from self.qk_norm.parameters(f"{layer}.self_attn.q_norm", self.num_heads, self.head_size)
            yield from self.qk_norm.parameters(f"{layer}.self_attn.k_norm", self.num_kv_heads, self.head_size)
        if self.sinks:
            yield Parameter(f"{layer}.self_attn.sinks", (self.num_heads,), float32=True)
        if self.relative_bias is not None:
            shape = (self.relative_bias.num_buckets, self.num_heads)
            yield Parameter(f"{self.relative_bias.name}.weight", shape, float32=True)


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Attention of a decoder's tokens to the `num_outputs` outputs [num_outputs, input_size] of an encoder. Keys and values of
    the outputs are stored while the sequence runs."""

    num_heads: int
    head_size: int
    num_outputs: int
    input_size: int
    query_bias: bool = True
    kv_bias: bool = True
    output_bias: bool = True

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)

    @property
    def memory_kind(self) -> MemoryKind:
        return Cross(AttentionKVSpec(self.num_heads, self.head_size), self.num_outputs)

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, Linear, Linear]:
        """Return three projections: to queries, to keys and values, and to the output."""
        size, name = self.num_heads * self.head_size, f"{layer}.cross_attn"
        return (
            Linear(f"{name}.q_proj", size, hidden_size, self.query_bias),
            Linear(f"{name}.kv_proj", 2 * size, self.input_size, self.kv_bias, (size, size)),
            Linear(f"{name}.o_proj", hidden_size, size, self.output_bias),
        )

    def parameters(self, layer: str, hidden_size: int) -> Iterator[Parameter]:
        for linear in self.linears(layer, hidden_size):
            yield from linear.parameters()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, 2024). The cache has one vector per token: a latent of `rank` dims and a rotated
    key.

    Each head expands the latent to a key of `key_size` and a value of `value_size` dims. To attention kernels this is one KV head
    of the vector's size, whose values are the latents. `query_rank`: size of the latent from which queries are computed; None for
    no latent. `norm`: norm of both latents. `bias`: bias of the projections into latents and of the output projection."""

    rank: int
    key_size: int
    value_size: int
    norm: RMSNorm
    query_rank: int | None = None
    bias: bool = False
    latent: ClassVar[bool] = True

    def linears(self, layer: str, hidden_size: int) -> tuple[Linear, ...]:
        """Return the projection to the latent, the output projection, and one or two projections to queries."""
        name, rotary_dim = f"{layer}.self_attn", self.head_size - self.rank
        queries, values = self.num_heads * (self.key_size + rotary_dim), self.num_heads * self.value_size
        ends = (
            Linear(f"{name}.kv_a_proj_with_mqa", self.head_size, hidden_size, self.bias),
            Linear(f"{name}.o_proj", hidden_size, values, self.bias, reduce=True),
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
