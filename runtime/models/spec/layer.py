"""Layers: how blocks stand on the residual stream, one after the other, side by side, or alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.kv.layout import MemoryShape
from runtime.models.spec.attention import Attention
from runtime.models.spec.mlp import GatedMLP, PlainMLP
from runtime.models.spec.moe import MoE
from runtime.models.spec.norm import Norm
from runtime.models.spec.recurrent import Recurrent
from runtime.weights.rules import Parameter

Mixer = Attention | Recurrent  # lets a token know of those before it
MLP = GatedMLP | PlainMLP | MoE  # works on each token alone
Block = Mixer | MLP


@dataclass(frozen=True, slots=True)
class Layer:
    """x + norm(mixer(norm(x))), then x + norm(mlp(norm(x))): norms `before` the two blocks, `after` them, or both.

    The pairs hold the norms' names. What a block adds is first multiplied by `multiplier`."""

    mixer: Mixer
    mlp: MLP
    norm: Norm
    before: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    multiplier: float = 1.0

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.mixer, self.mlp)

    @property
    def kv_shape(self) -> MemoryShape:
        return self.mixer.kv_shape

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        for index, block in enumerate(self.blocks):
            if self.before is not None:
                yield from self.norm.parameters(f"{name}.{self.before[index]}", hidden_size)
            yield from block.parameters(name, hidden_size)
            if self.after is not None:
                yield from self.norm.parameters(f"{name}.{self.after[index]}", hidden_size)


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """x + mixer(norm(x)) + mlp(norm(x)). `norms`: the name of the one before both, or of one for each."""

    mixer: Mixer
    mlp: MLP
    norm: Norm
    norms: tuple[str] | tuple[str, str] = ("input_layernorm",)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.mixer, self.mlp)

    @property
    def kv_shape(self) -> MemoryShape:
        return self.mixer.kv_shape

    def parameters(self, name: str, hidden_size: int) -> Iterator[Parameter]:
        for norm in self.norms:
            yield from self.norm.parameters(f"{name}.{norm}", hidden_size)
        yield from self.mixer.parameters(name, hidden_size)
        yield from self.mlp.parameters(name, hidden_size)


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


AnyLayer = Layer | ParallelLayer | SingleLayer
