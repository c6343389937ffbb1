"""Allowed tokens: nothing else can be drawn. For the whole of a sequence; one with matchers has other masks in each step."""

from __future__ import annotations

import torch

from ops.sampling import tables
from ops.transfer import upload
from runtime.batch import RowBinding
from runtime.constrain.masks import mask_of_set
from runtime.sample.stage import Record


class AllowedTokens:
    def __init__(self, masks: torch.Tensor) -> None:
        """masks [R, V / 32 up] int32."""
        self._masks = masks

    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        allowed = binding.params.allowed_token_ids
        if binding.masked:
            record.words[tables.FLAGS] |= tables.MASKED  # each of its draws brings masks
        elif allowed is not None:
            record.words[tables.FLAGS] |= tables.MASKED
            upload(self._masks[row], mask_of_set(allowed, self._masks.shape[1]))
