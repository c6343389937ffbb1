"""Specs of layers: how blocks are connected to the residual stream, in sequence, in parallel, or alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from runtime.models.spec.attention import Attention, CrossAttention
from runtime.models.spec.linear import Linear
from runtime.models.spec.mlp import GatedMLP, MoE, PlainMLP
from runtime.models.spec.norm import Norm, RMSNorm
from runtime.models.spec.recurrent import Recurrent
from runtime.weights.rules import Parameter

Adapter = tuple[
    Linear, Linear
]  # low-rank pair: the second matrix multiplies the first's output and adds to a larger matrix of the same input


@dataclass(frozen=True, slots=True)
class SharedTransformer:
    """Transformer layer that several `HybridLayer`s share. It computes linear(mlp(norm(attention(norm(concatenation of x and the
    embedding))))), without residuals.

    `name`: name of the shared weights, which are all but those of `linear`. `user`: number of the `HybridLayer` among those that
    share the weights; it is part of the names of its LoRA-like adapters. `rank`: rank of the adapters. The MLP has an adapter;
    q, k and v have adapters if `adapts_attention` is set."""

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
        """Return the adapters of q, k and v."""
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


Mixer = Attention | CrossAttention | Recurrent  # mixes information between tokens, or from encoder outputs
MLP = GatedMLP | PlainMLP | MoE  # processes each token separately
OnlyBlock = Mixer | MLP
Block = OnlyBlock | SharedTransformer


@dataclass(frozen=True, slots=True)
class Branch:
    """One of several parallel mixers of a layer, with factors for its input and its output."""

    mixer: Mixer
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class ParallelMixers:
    """Mixers that read the same input, and whose outputs are added."""

    branches: tuple[Branch, ...]


def branches(mixer: Mixer | ParallelMixers) -> tuple[Branch, ...]:
    return mixer.branches if isinstance(mixer, ParallelMixers) else (Branch(mixer),)


@dataclass(frozen=True, slots=True)
class _MixerAndMLP:
    mixer: Mixer | ParallelMixers
    mlp: MLP
    norm: Norm

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(branch.mixer for branch in branches(self.mixer))

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (*self.mixers, self.mlp)


@dataclass(frozen=True, slots=True)
class Layer(_MixerAndMLP):
    """Layer that computes x + norm(mixer(norm(x))), then x + norm(mlp(norm(x))). Each of the four norms is optional.

    `before`: names of the norms before mixer and MLP. `after`: names of the norms after mixer and MLP. `multiplier`: factor of
    the outputs of mixer and MLP. `mixer_norm`: kind of the norm before the mixer, if it differs from `norm`."""

    before: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    multiplier: float = 1.0
    mixer_norm: Norm | None = None

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        halves: tuple[tuple[Block, ...], ...] = self.mixers, (self.mlp,)
        for index, blocks in enumerate(halves):
            if self.before is not None:
                norm = self.norm if index or self.mixer_norm is None else self.mixer_norm
                yield from norm.parameters(f"{name}.{self.before[index]}", hidden_size)
            for block in blocks:
                yield from block.parameters(name, hidden_size)
            if self.after is not None:
                yield from self.norm.parameters(f"{name}.{self.after[index]}", hidden_size)


@dataclass(frozen=True, slots=True)
class PostNormLayer(_MixerAndMLP):
    """Layer that computes x = norm(x + mixer(x)), then norm(x + mlp(x)). `norms`: names of the two norms."""

    norms: tuple[str, str]

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        halves: tuple[tuple[Block, ...], ...] = self.mixers, (self.mlp,)
        for norm, blocks in zip(self.norms, halves, strict=True):
            for block in blocks:
                yield from block.parameters(name, hidden_size)
            yield from self.norm.parameters(f"{name}.{norm}", hidden_size)


@dataclass(frozen=True, slots=True)
class ParallelLayer(_MixerAndMLP):
    """Layer that computes x + mixer(norm(x)) + mlp(norm(x)). `norms`: name of the common norm, or names of the mixer's and the
    MLP's norm."""

    norms: tuple[str] | tuple[str, str] = ("input_layernorm",)

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        for norm in self.norms:
            yield from self.norm.parameters(f"{name}.{norm}", hidden_size)
        for block in self.blocks:
            yield from block.parameters(name, hidden_size)


@dataclass(frozen=True, slots=True)
class SingleLayer:
    """Layer with one block: it computes x + block(norm(x)). `before`: name of the norm."""

    block: OnlyBlock
    norm: Norm
    before: str = "norm"

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return () if isinstance(self.block, MLP) else (self.block,)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.block,)

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        yield from self.norm.parameters(f"{name}.{self.before}", hidden_size)
        yield from self.block.parameters(name, hidden_size)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """First layer of a draft head (EAGLE-3, 2025). It computes x + mixer(concatenation of norm(embedding) and norm(x)), then x +
    mlp(norm(x)).

    The embedding is the step's `input_embeds`. `normed_residual`: the mixer's output is added to norm(x) instead of x. `norms`:
    names of the norms of the embedding, of x, and before the MLP."""

    mixer: Attention
    mlp: GatedMLP | PlainMLP | MoE
    norm: Norm
    normed_residual: bool = False
    norms: tuple[str, str, str] = ("input_layernorm", "hidden_norm", "post_attention_layernorm")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return (self.mixer,)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.mixer, self.mlp)

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        for norm in self.norms:
            yield from self.norm.parameters(f"{name}.{norm}", hidden_size)
        for block in self.blocks:
            yield from block.parameters(name, hidden_size)


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """Layer that computes x + mixer(norm(x + shared(x and the embedding)))."""

    shared: SharedTransformer
    mixer: Recurrent
    norm: Norm
    before: str = "input_layernorm"

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return (self.shared.attention, self.mixer)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.shared, self.mixer)

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        yield from self.shared.parameters(name, hidden_size)
        yield from self.norm.parameters(f"{name}.{self.before}", hidden_size)
        yield from self.mixer.parameters(name, hidden_size)


AnyLayer = Layer | PostNormLayer | ParallelLayer | SingleLayer | FusedLayer | HybridLayer
