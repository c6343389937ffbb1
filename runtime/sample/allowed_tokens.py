"""Sampling stage that restricts all samples of a sequence to a set of tokens. Grammars use other masks, which differ in each
step."""

from __future__ import annotations

import torch

from ops.sampling import tables
from ops.transfer import upload
from runtime.batch import RowBinding
from runtime.constrain.masks import mask_of_set
from runtime.sample.stage import Record


class AllowedTokens:
    def __init__(self, masks: torch.Tensor) -> None:
        """Create the stage. masks [R, ceil(V / 32)] int32: one bit per token."""
        self._masks = masks

    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        allowed = binding.params.allowed_token_ids
        if binding.masked:
            record.words[tables.FLAGS] |= tables.MASKED  # its masks arrive with each sampling
        elif allowed is not None:
            record.words[tables.FLAGS] |= tables.MASKED
            upload(self._masks[row], mask_of_set(allowed, self._masks.shape[1]))
