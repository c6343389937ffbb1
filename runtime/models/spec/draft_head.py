"""Specs of draft heads: a few layers that predict tokens from a larger model's hidden states (MTP modules, DeepSeek-V3, 2024;
EAGLE, Li et al. 2024).

At each position, the input is the model's hidden state and the embedding of the next token, which the model has already sampled.
The output predicts the token after that one. For the next draft token, the head's own hidden state replaces the model's. A head
therefore lags one token behind the model: its KV at a position depends on that position's token and on the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from runtime.api import PoolerInfo
from runtime.kv.kinds import MemoryKind, State
from runtime.models.spec.decoder import EMBEDDING, HEAD, DecoderSpec
from runtime.models.spec.linear import Linear
from runtime.models.spec.model import EncoderSpec, ModelSpec, UnsupportedModel
from runtime.models.spec.norm import Norm
from runtime.weights.rules import Parameter, Shape, WeightsError

ENTRY = "model.entry"
TOKEN_OFFSETS = "d2t"  # offset from each draft token id to the model's id; exact in float32
EMBEDDING_NORM, HIDDEN_NORM, PROJECTION = f"{ENTRY}.embedding_norm", f"{ENTRY}.hidden_norm", f"{ENTRY}.projection"


@dataclass(frozen=True, slots=True)
class JoinedEntry:
    """Input layer of a draft head: a projection of norm(embedding) and norm(hidden state), concatenated."""

    norm: Norm
    hidden_first: bool = False
    bias: bool = False

    def linear(self, hidden_size: int) -> Linear:
        return Linear(PROJECTION, hidden_size, 2 * hidden_size, self.bias)

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        yield from self.norm.parameters(EMBEDDING_NORM, hidden_size)
        yield from self.norm.parameters(HIDDEN_NORM, hidden_size)
        yield from self.linear(hidden_size).parameters()


@dataclass(frozen=True, slots=True)
class FusedEntry:
    """Input layer of a head whose first layer is a `FusedLayer`, which reads the embedding separately. It projects the model's
    hidden states, `size` dims in total. In later rounds the head's own hidden state is used instead."""

    size: int

    def linear(self, hidden_size: int) -> Linear:
        return Linear(PROJECTION, hidden_size, self.size)

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        yield from self.linear(hidden_size).parameters()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadSpec(DecoderSpec):
    """Spec of a draft head: `entry` combines embedding and hidden state, and the layers read its output.

    The head uses the model's embedding and output head unless it has its own (`own_embedding`, `own_head`). `draft_vocab_size`:
    size of a reduced draft vocabulary; None for all tokens. `reads_layers`: layers of the model whose inputs are read instead of
    the final norm's output. `below`: name prefixes of the head's tensors in a shared checkpoint. `hands_on_normed`: the next
    draft token is computed from the output of the head's final norm instead of the norm's input."""

    entry: JoinedEntry | FusedEntry
    reads_layers: tuple[int, ...] = ()
    below: tuple[str, ...] = ()
    hands_on_normed: bool = False
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = None

    @classmethod
    def of(cls, model: DecoderSpec, **given: Any) -> DraftHeadSpec:
        """Return the spec of a draft head for `model`, with the model's vocabulary and sizes. Raises UnsupportedModel if the model
        cannot have a draft head."""
        if not model.generates or model.embedding_size is not None or model.positions is not None:
            raise UnsupportedModel(f"{model.architecture} has no embedding and no head that a draft head could share")
        ends = ("vocab_size", "hidden_size", "max_model_len", "embedding_multiplier", "logit_scale", "logit_softcap")
        kept = {field.name: getattr(model, field.name) for field in fields(DecoderSpec) if field.name in ends}
        return cls(**{**kept, "tied_embedding": False, "head_bias": model.head_bias} | given)

    @property
    def head(self) -> Linear:
        return Linear(HEAD, self.draft_vocab_size or self.vocab_size, self.hidden_size, self.head_bias)

    def linears(self) -> Iterator[Linear]:
        yield self.entry.linear(self.hidden_size)
        for name, block in self.blocks():
            yield from block.linears(name, self.hidden_size)
        if self.own_head:
            yield self.head

    def parameters(self) -> Iterator[Parameter]:
        yield from self.entry.parameters(self.hidden_size)
        if self.draft_vocab_size is not None:
            yield Parameter(TOKEN_OFFSETS, (self.draft_vocab_size,), float32=True)
        own = {f"{EMBEDDING}.": self.own_embedding, f"{HEAD}.": self.own_head}
        shared = tuple(name for name, is_own in own.items() if not is_own)
        yield from (each for each in DecoderSpec.parameters(self) if not each.name.startswith(shared))

    def own(self, stored: Mapping[str, Shape]) -> Mapping[str, Shape]:
        if not self.below:
            return stored
        found = {name: shape for name, shape in stored.items() if name.startswith(self.below)}
        if not found:
            raise WeightsError(f"the checkpoint has no MTP layers: no tensor whose name begins with {self.below[0]}")
        return found

    @property
    def num_parameters(self) -> int:
        return sum(prod(parameter.shape) for parameter in self.parameters())


_ANY_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Spec of a model and its draft model or draft head. Both store their KV cache in the same blocks, `draft` after `model`. A
    block is therefore freed, shared or reused for both."""

    model: ModelSpec
    draft: ModelSpec

    @classmethod
    def of(cls, model: ModelSpec, draft: ModelSpec) -> PairSpec:
        """Return the spec of `model` and `draft`. Raises UnsupportedModel if `draft` cannot draft for `model`."""
        if not (model.generates and draft.generates):
            which = draft if model.generates else model
            raise UnsupportedModel(f"the draft model {which.architecture} does not generate tokens")
        if model.vocab_size != draft.vocab_size:
            raise UnsupportedModel(
                f"the draft model's vocabulary has {draft.vocab_size} tokens and the model's {model.vocab_size}: they have to be "
                "the same"
            )
        if any(isinstance(kind, State) for kind in draft.memory_kinds()):
            raise UnsupportedModel(
                f"the draft model ({draft.architecture}) has recurrent layers, which draft models may not have"
            )
        for each, title in ((model, "model"), (draft, "draft model")):
            if any(kind.in_one_step for kind in each.memory_kinds()):
                raise UnsupportedModel(
                    f"the {title} ({each.architecture}) has no KV cache, which speculative decoding needs"
                )
        return cls(model, draft)

    @classmethod
    def with_head(cls, model: DecoderSpec, head: DraftHeadSpec) -> PairSpec:
        """Return the spec of `model` and its draft head `head`. The model then also returns the layer inputs that the head
        reads."""
        return cls(replace(model, aux_layers=head.reads_layers), head)

    @property
    def architecture(self) -> str:
        return self.model.architecture

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest context that both models support."""
        return min(self.model.max_model_len, self.draft.max_model_len)

    @property
    def pooler_info(self) -> PoolerInfo:
        return self.model.pooler_info

    @property
    def generates(self) -> bool:
        return True

    @property
    def hands_on(self) -> bool:
        return False

    @property
    def encoder(self) -> EncoderSpec | None:
        return self.model.encoder

    def weights_bytes(self, dtype: str) -> int:
        return self.model.weights_bytes(dtype) + self.draft.weights_bytes(dtype)

    @property
    def draft_share(self) -> float:
        """Bytes of the draft's weights divided by those of the model's, in the same dtype. It approximates the ratio of their
        step times."""
        return self.draft.weights_bytes(_ANY_DTYPE) / max(1, self.model.weights_bytes(_ANY_DTYPE))

    def memory_kinds(self) -> tuple[MemoryKind, ...]:
        return self.model.memory_kinds() + self.draft.memory_kinds()
