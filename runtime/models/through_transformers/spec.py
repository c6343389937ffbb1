"""Specs of models run through transformers: TransformersSpec for decoders, whose attention calls were found by tracing, and
PaddedSpec for encoders of whole texts.

They contain data only, and need neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from runtime.api import PoolerInfo
from runtime.config import ELEMENT_BYTES
from runtime.kv.kinds import AttentionKVSpec, Full, Nothing, Window
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.pooler import PoolerSpec
from runtime.weights.sentence_transformers import SentenceModules


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call of a forward pass through transformers. Keys and values may differ in width. `window`, `softcap`: see
    `ops.paged_attention`."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    softcap: float | None

    @property
    def head_size(self) -> int:
        """Head size in the KV cache. If keys and values differ in width, the narrower ones are padded."""
        return max(self.key_size, self.value_size)

    @property
    def memory_kind(self) -> Full | Window:
        kv = AttentionKVSpec(self.num_kv_heads, self.head_size)
        return Full(kv) if self.window is None else Window(kv, self.window)


@dataclass(frozen=True, slots=True)
class TransformersSpec:
    """Spec of a decoder run through transformers. `calls`: attention calls in the order of a forward pass. `config`: transformers'
    config object. `native_reason`: why our own decoder does not support this model, if its family is known."""

    architecture: str
    vocab_size: int
    max_model_len: int
    num_parameters: int
    hidden_size: int
    calls: tuple[AttentionCall, ...]
    config: Any
    pooler: PoolerSpec
    native_reason: str | None = None

    @property
    def generates(self) -> bool:
        return True

    @property
    def hands_on(self) -> bool:
        return False

    @property
    def pooler_info(self) -> PoolerInfo:
        return self.pooler.info(self.hidden_size)

    @property
    def encoder(self) -> None:
        """Return None: only text is served."""

    def weights_bytes(self, dtype: str) -> int:
        return ELEMENT_BYTES[dtype] * self.num_parameters

    def memory_kinds(self) -> tuple[Full | Window, ...]:
        return tuple(call.memory_kind for call in self.calls)


@dataclass(frozen=True, slots=True)
class PaddedSpec:
    """Spec of an encoder of whole texts, with an optional head. `architecture`: transformers' class of the whole model; `base`: its
    class that returns hidden states; `config`: its config object. `pad_token_id`: token id that pads shorter texts."""

    architecture: str
    base: str
    vocab_size: int
    max_model_len: int
    num_parameters: int
    hidden_size: int
    num_token_types: int
    pad_token_id: int
    pooler: PoolerSpec
    config: Any
    native_reason: str | None = None
    generates: bool = False
    hands_on: bool = False
    encoder: None = None

    @property
    def pooler_info(self) -> PoolerInfo:
        return self.pooler.info(self.hidden_size, self.num_token_types)

    def weights_bytes(self, dtype: str) -> int:
        return ELEMENT_BYTES[dtype] * self.num_parameters

    def memory_kinds(self) -> tuple[Nothing]:
        return (Nothing(),)


def padded_with_modules(spec: TransformersSpec | PaddedSpec, modules: SentenceModules) -> PaddedSpec:
    """Return `spec` with the pooling of sentence-transformers' modules. Raises UnsupportedModel if `spec` or `modules` do not
    support it."""
    if not isinstance(spec, PaddedSpec) or modules.dense or modules.label_token_ids:
        raise UnsupportedModel(
            f"{spec.architecture} runs through transformers; of sentence-transformers' modules behind such a model, only pooling "
            "and normalisation are served, of encoders"
        )
    pooler = spec.pooler
    if pooler.labels and modules.activation is not None:
        pooler = replace(pooler, activation=modules.activation)
    if modules.pooling is not None:
        pooler = replace(pooler, pooling=modules.pooling, normalize=modules.normalize)
    return replace(spec, pooler=pooler)
