"""DecoderSpec: description of a model that our own decoder computes, and the names of its tensors in checkpoints.

Encoders have a DecoderSpec too. Their attention is bidirectional, they have no output head, and they may have token types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

from runtime.api import PoolerInfo
from runtime.config import ELEMENT_BYTES
from runtime.kv.kinds import MemoryKind
from runtime.models.spec.attention import Attention
from runtime.models.spec.layer import AnyLayer, Block, Layer, Mixer, ParallelLayer, PostNormLayer
from runtime.models.spec.linear import Linear
from runtime.models.spec.mlp import Experts, MoE
from runtime.models.spec.model import EncoderSpec
from runtime.models.spec.norm import Norm
from runtime.models.spec.pooler import POOLS_LAST, PoolerSpec
from runtime.weights.rules import Parameter, Rule, Shape, merge, rename

EMBEDDING = "model.embed_tokens"
EMBEDDING_NORM = "model.embed_norm"
POSITIONS = "model.embed_positions"
TOKEN_TYPES = "model.embed_token_types"
FINAL_NORM = "model.norm"
HEAD = "lm_head"
PROJECT_IN, PROJECT_OUT = "model.project_in", "model.project_out"
LLAMA_RULES = (
    merge("q_proj k_proj v_proj", into="qkv_proj"),
    merge("gate_proj up_proj", into="gate_up_proj"),
)
TIED_HEAD_BIAS = rename(f"{HEAD}.bias", into=f"{EMBEDDING}.bias")  # a tied head may have its own bias


def layer_name(index: int) -> str:
    return f"model.layers.{index}"


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """Learned position vectors, added to the embedding. Position p uses row p + `offset`. `rows`: number of rows."""

    rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ShardOf:
    """Place of a shard: it is computed by device `rank` of `size`, and `whole` is the spec of the whole model (sharding.py)."""

    whole: DecoderSpec
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class StageOf:
    """Place of a pipeline stage: it is stage `number` of `size`, and its first layer is layer `first_layer` of `whole` (stages.py).

    `elsewhere`: memory kinds of other stages' layers, for which blocks reserve space too. `lends`: the stage also has the
    embedding, because a draft head uses it."""

    whole: DecoderSpec
    number: int
    size: int
    first_layer: int
    elsewhere: tuple[MemoryKind, ...]
    lends: bool = False

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.size - 1


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Description of a decoder or encoder: everything that its computation needs, as plain data.

    - `max_model_len`: longest context in tokens
    - `norm`: norm of the last layer's output; `embedding_norm`: norm of the first layer's input
    - `tied_embedding`: the output head uses the embedding matrix
    - `embedding_size`: width of embedding and head, which then have projections from and to the hidden size
    - `embedding_multiplier`, `logit_scale`: factors; `logit_softcap`: logits become softcap * tanh(logit / softcap)
    - `rules`, `ignored`, `ignored_below`: mapping of checkpoint names; `other_rules`: alternatives
    - `pooler`: pooling of prompts; `encoder`: media encoder; `generates`: the model has an output head
    - `num_token_types`: number of token types whose vectors are added to the embedding
    - `shard_of`: set on a shard, which has `vocab_rows` rows of the vocabulary; `stage_of`: set on a pipeline stage
    - `aux_layers`: layers whose inputs are also returned for a draft head, ascending; the number of layers: the last output"""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[AnyLayer, ...]
    norm: Norm
    tied_embedding: bool
    max_model_len: int
    positions: LearnedPositions | None = None
    embedding_size: int | None = None
    embedding_norm: Norm | None = None
    embedding_multiplier: float = 1.0
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    rules: tuple[Rule, ...] = LLAMA_RULES
    other_rules: tuple[tuple[Rule, ...], ...] = ()
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    ignored_below: tuple[str, ...] = ()
    shard_of: ShardOf | None = None
    stage_of: StageOf | None = None
    pooler: PoolerSpec = POOLS_LAST
    num_token_types: int = 0
    generates: bool = True
    encoder: EncoderSpec | None = None
    aux_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len({isinstance(layer, PostNormLayer) for layer in self.layers}) > 1:
            raise ValueError("layers with norms behind their blocks hand on no residual for others to add to")

    def with_mixers(self, change: Callable[[int, Attention], Mixer]) -> DecoderSpec:
        """Return this spec with the attention of each layer replaced by `change(layer index, attention)`."""

        def changed(index: int, layer: AnyLayer) -> AnyLayer:
            if isinstance(layer, Layer | PostNormLayer | ParallelLayer) and isinstance(layer.mixer, Attention):
                return replace(layer, mixer=change(index, layer.mixer))
            return layer

        return replace(self, layers=tuple(changed(*each) for each in enumerate(self.layers)))

    def with_attention(self, **changes: Any) -> DecoderSpec:
        """Return this spec with `changes`, values by field name, applied to the attention of all layers."""
        return self.with_mixers(lambda _, attention: replace(attention, **changes))

    def with_layers(self, change: Callable[[int, Layer], AnyLayer]) -> DecoderSpec:
        """Return this spec with each `Layer` replaced by `change(layer index, layer)`; layers of other classes are unchanged."""
        layers = (
            change(index, layer) if isinstance(layer, Layer) else layer for index, layer in enumerate(self.layers)
        )
        return replace(self, layers=tuple(layers))

    @property
    def whole(self) -> DecoderSpec:
        """Spec of the whole model; this spec itself unless it is a stage or a shard."""
        spec = self.all_layers
        return spec if spec.shard_of is None else spec.shard_of.whole

    @property
    def all_layers(self) -> DecoderSpec:
        """Spec with the layers of all pipeline stages. If this spec is a shard, so is the result."""
        return self if self.stage_of is None else self.stage_of.whole

    @property
    def embeds(self) -> bool:
        """True if the input is token ids; False if it is the hidden states of the previous pipeline stage."""
        return self.stage_of is None or self.stage_of.is_first

    @property
    def has_embedding(self) -> bool:
        return self.embeds or (self.stage_of is not None and self.stage_of.lends)

    @property
    def hands_on(self) -> bool:
        """True if the output is hidden states for the next pipeline stage."""
        return self.stage_of is not None and not self.stage_of.is_last

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the embedding and of the head."""
        return self.vocab_size if self.shard_of is None else self.vocab_size // self.shard_of.size

    @property
    def attention(self) -> Attention:
        """Attention of the first layer that has attention."""
        return next(self.attentions())

    def attentions(self) -> Iterator[Attention]:
        """Yield the attention of all layers that have attention."""
        yield from (mixer for mixer in self._mixers() if isinstance(mixer, Attention))

    def _mixers(self) -> Iterator[Mixer]:
        for layer in self.layers:
            yield from layer.mixers

    @property
    def head(self) -> Linear:
        size = self.embedding_size or self.hidden_size
        return Linear(EMBEDDING if self.tied_embedding else HEAD, self.vocab_rows, size, self.head_bias)

    @property
    def projections(self) -> tuple[Linear, ...]:
        """Projections from the embedding to the hidden size, and back; () if the sizes are equal."""
        return tuple(each for each in (self.project_in, self.project_out) if each is not None)

    @property
    def project_in(self) -> Linear | None:
        if self.embedding_size is None or not self.embeds:
            return None
        return Linear(PROJECT_IN, self.hidden_size, self.embedding_size)

    @property
    def project_out(self) -> Linear | None:
        if self.embedding_size is None or self.hands_on:
            return None
        return Linear(PROJECT_OUT, self.embedding_size, self.hidden_size)

    def linears(self) -> Iterator[Linear]:
        for name, block in self.blocks():
            yield from block.linears(name, self.hidden_size)
        yield from self.projections
        if self.generates:
            yield self.head
        yield from self.pooler.linears()

    def experts(self) -> Iterator[Experts]:
        for name, block in self.blocks():
            if isinstance(block, MoE):
                yield block.experts(name, self.hidden_size)

    def named_layers(self) -> Iterator[tuple[str, AnyLayer]]:
        """Yield layers with their names in the whole model."""
        first = 0 if self.stage_of is None else self.stage_of.first_layer
        yield from ((layer_name(index), layer) for index, layer in enumerate(self.layers, first))

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Yield blocks with the names of their layers."""
        for name, layer in self.named_layers():
            yield from ((name, block) for block in layer.blocks)

    def parameters(self) -> Iterator[Parameter]:
        """Yield each parameter once, in the order of use; with a tied embedding, the head comes last."""
        if self.has_embedding and not (self.tied_embedding and self.generates):
            yield Parameter(f"{EMBEDDING}.weight", (self.vocab_rows, self.embedding_size or self.hidden_size))
        if self.embedding_norm is not None:
            yield from self.embedding_norm.parameters(EMBEDDING_NORM, self.hidden_size)
        if self.positions is not None:
            yield Parameter(f"{POSITIONS}.weight", (self.positions.rows, self.hidden_size))
        if self.num_token_types:
            yield Parameter(f"{TOKEN_TYPES}.weight", (self.num_token_types, self.hidden_size))
        of_layers = (layer.parameters(name, self.hidden_size) for name, layer in self.named_layers())
        yield from dict.fromkeys(chain.from_iterable(of_layers))  # layers may share parameters
        if not self.hands_on:
            yield from self.norm.parameters(FINAL_NORM, self.hidden_size)
        for linear in self.projections:
            yield from linear.parameters()
        if self.generates:
            yield from self.head.parameters()
        yield from self.pooler.parameters()

    def own(self, stored: Mapping[str, Shape]) -> Mapping[str, Shape]:
        """Return the tensors of the checkpoint that belong to this model, each of which must match a parameter or a rule. Raises
        WeightsError."""
        return stored

    @property
    def pooler_info(self) -> PoolerInfo:
        return self.pooler.info(self.hidden_size, self.num_token_types)

    def weights_bytes(self, dtype: str) -> int:
        """Return the size of all parameters in bytes, if they are stored as `dtype`."""
        return ELEMENT_BYTES[dtype] * sum(prod(parameter.shape) for parameter in self.parameters())

    def memory_kinds(self) -> tuple[MemoryKind, ...]:
        """Return the memory kind of each mixer, layer by layer, then the kinds of other stages for which blocks reserve space."""
        elsewhere = () if self.stage_of is None else self.stage_of.elsewhere
        return (*(mixer.memory_kind for mixer in self._mixers()), *elsewhere)
