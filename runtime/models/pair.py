"""Pair of a model and its draft model or draft head. The runner uses the model, the drafter uses the draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from runtime.kv.kv_cache import LayerKV
from runtime.models.adapters import ModelAdapters
from runtime.models.blocks.pooler import PoolerBlock
from runtime.models.draft_head import DraftHead
from runtime.models.forward_step import ForwardStep
from runtime.models.model import Encoder, Model
from runtime.models.spec.draft_head import PairSpec


class ModelPair:
    """Model and its draft model or draft head, behind the interface `Model`. A step's KV caches are those of `model`, then those of
    `draft`."""

    def __init__(self, model: Model, draft: Model | DraftHead) -> None:
        self.model = model
        self.draft = draft
        self.spec = PairSpec(model.spec, draft.spec)
        self._num_caches = len(model.spec.memory_kinds())

    @property
    def dtype(self) -> str:
        return self.model.dtype

    @property
    def device(self) -> str:
        return self.model.device

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters + self.draft.num_parameters

    @property
    def weights_bytes(self) -> int:
        return self.model.weights_bytes + self.draft.weights_bytes

    @property
    def pooler(self) -> PoolerBlock:
        return self.model.pooler

    @property
    def graph_unsupported_reason(self) -> str | None:
        return self.model.graph_unsupported_reason or self.draft.graph_unsupported_reason

    @property
    def adapters(self) -> ModelAdapters | None:
        """Adapters of the model; drafts use none."""
        return self.model.adapters

    @property
    def encoder(self) -> Encoder | None:
        """Encoder of the model; the draft model uses ids only."""
        return self.model.encoder

    @property
    def may_refuse_capture(self) -> bool:
        return self.model.may_refuse_capture or self.draft.may_refuse_capture

    def draft_caches(self, kv_caches: Sequence[LayerKV]) -> Sequence[LayerKV]:
        """Return the caches of `draft`, which are the last of `kv_caches`."""
        return kv_caches[self._num_caches :]

    def traced(self, kv_caches: Sequence[LayerKV]) -> ModelPair:
        model = self.model.traced(kv_caches[: self._num_caches])
        return ModelPair(model, self.draft.traced(self.draft_caches(kv_caches)))

    def embed(self, input_ids: Tensor, adapters: Tensor | None = None) -> Tensor:
        return self.model.embed(input_ids, adapters)

    def forward(self, step: ForwardStep) -> Any:
        return self.model.forward(step)

    def compute_logits(self, hidden: Any, tokens: Tensor | None = None) -> Tensor:
        return self.model.compute_logits(hidden, tokens)

    def final_hidden(self, hidden: Any, tokens: Tensor | slice) -> Tensor:
        return self.model.final_hidden(hidden, tokens)
