"""Bidirectional encoder of transformers' modules with our interface `Model`. Rows of similar length are padded to a batch, and
outputs are packed again.

The outputs are the base model's hidden states. If there is a head, they are followed by its output for the token or text. This
works with any torch modules, independent of how they were built or loaded."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from runtime.kv.kv_cache import LayerKV
from runtime.models.blocks.pooler import PoolerBlock
from runtime.models.forward_step import ForwardStep
from runtime.models.spec.pooler import PoolerSpec
from runtime.models.through_transformers.spec import PaddedSpec

MOST_PADDING = 1 / 8  # share of a batch's tokens


class _Sides(PoolerBlock):
    """Pooler of vectors [P, H + C], which contain an embedding and then class scores that a head has computed."""

    def __init__(self, spec: PoolerSpec, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(spec, None, dtype)
        self._hidden_size = hidden_size

    def embed(self, x: Tensor) -> Tensor:
        return x[:, : self._hidden_size]

    def classify(self, x: Tensor, *, activate: bool) -> Tensor:
        return super().classify(x[:, self._hidden_size :].contiguous(), activate=activate)


class PaddedModel:
    """Encoder that runs on padded batches of texts, an implementation of `model.Model`. `whole`: a model of transformers; `base`:
    the part of it that returns hidden states, possibly all."""

    graph_unsupported_reason = "its modules pad texts to a batch, whose shape is the texts'"
    may_refuse_capture = True
    adapters = None
    encoder = None

    def __init__(
        self, spec: PaddedSpec, whole: nn.Module, base: nn.Module, *, dtype: str, device: str, weights_bytes: int
    ) -> None:  # fmt: skip
        self.spec, self.dtype, self.device = spec, dtype, device
        self.num_parameters, self.weights_bytes = spec.num_parameters, weights_bytes
        self.pooler: PoolerBlock = _Sides(spec.pooler, spec.hidden_size, getattr(torch, dtype))
        self.pads = (
            True  # whether texts of different lengths may be padded to one; False if padding changes the outputs
        )
        self._whole = whole
        self._has_head = whole is not base
        self._takes_types = "token_type_ids" in inspect.signature(base.forward).parameters
        self._base_output: Any = None
        base.register_forward_hook(self._note)

    def _note(self, module: nn.Module, given: Any, output: Any) -> None:
        self._base_output = output

    def traced(self, kv_caches: Sequence[LayerKV]) -> Self:
        return self

    def embed(self, input_ids: Tensor, adapters: Tensor | None = None) -> Tensor:
        raise NotImplementedError("it takes tokens alone")

    def compute_logits(self, hidden: Any, tokens: Tensor | None = None) -> Tensor:
        raise NotImplementedError("it generates no tokens")

    def final_hidden(self, hidden: Tensor, tokens: Tensor | slice) -> Tensor:
        return hidden[tokens]

    def forward(self, step: ForwardStep) -> Tensor:
        """Return hidden states [T, H]; if the model has a head with C classes, [T, H + C]."""
        spans = list(pairwise(step.attn_metadata[0].query_start_loc.tolist()))
        width = self.spec.hidden_size + len(self.spec.pooler.labels)
        packed = torch.empty(
            (len(step.input_ids), width), dtype=getattr(torch, self.dtype), device=step.input_ids.device
        )
        for batch in batches_of([stop - start for start, stop in spans], MOST_PADDING if self.pads else 0.0):
            rows = [slice(*spans[row]) for row in batch]
            for row, states in zip(rows, self._states(step, rows), strict=True):
                packed[row] = states[: row.stop - row.start]
        return packed

    def _states(self, step: ForwardStep, rows: Sequence[slice]) -> Tensor:
        ids = pad_sequence(
            [step.input_ids[row] for row in rows], batch_first=True, padding_value=self.spec.pad_token_id
        )
        lengths = torch.tensor([row.stop - row.start for row in rows], device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        given = {"input_ids": ids, "attention_mask": mask.long()}
        if self._takes_types and self.spec.num_token_types:
            types = step.token_type_ids
            given["token_type_ids"] = (
                torch.zeros_like(ids) if types is None else pad_sequence([types[row] for row in rows], batch_first=True)
            )
        try:
            output = self._whole(**given)
            hidden: Tensor = self._base_output[0]
        finally:
            self._base_output = None
        if not self._has_head:
            return hidden
        logits: Tensor = output.logits
        if not self.spec.pooler.labels_tokens:
            logits = logits[:, None].expand(-1, hidden.shape[1], -1)
        return torch.cat([hidden, logits.to(hidden.dtype)], dim=2)


def batches_of(lengths: Sequence[int], most_padding: float) -> list[list[int]]:
    """Return batches of row indices. Rows of a batch have similar lengths: the fraction of padding in it is at most `most_padding`.
    Empty rows are in no batch."""
    found: list[list[int]] = []
    num_tokens = most = 0
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]):
        num_rows = len(found[-1]) + 1 if found else 0
        if found and most * num_rows - num_tokens - lengths[row] <= most_padding * most * num_rows:
            found[-1].append(row)
            num_tokens += lengths[row]
        else:
            found.append([row])
            num_tokens = most = lengths[row]
    return found
