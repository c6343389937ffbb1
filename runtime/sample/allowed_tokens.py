"""Allowed tokens: nothing else can be drawn. For the whole of a sequence, or, where it has matchers, for one step after another."""

from __future__ import annotations

import numpy as np
import torch

from ops.sampling import tables
from runtime.batch import RowBinding
from runtime.constrain.masks import RowMasks, mask_of
from runtime.sample.stage import Record
from runtime.transfer import upload


class AllowedTokens:
    def __init__(self, masks: torch.Tensor) -> None:
        """masks [R, V / 32 up] int32."""
        self._masks = masks

    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        allowed = binding.params.allowed_token_ids
        if binding.masked:
            record.words[tables.FLAGS] |= tables.MASKED  # `restrict` comes before each draw
        elif allowed is not None:
            record.words[tables.FLAGS] |= tables.MASKED
            upload(self._masks[row], mask_of(allowed, self._masks.shape[1]))

    def restrict(self, masks: RowMasks) -> None:
        """Until the next call, rows with matchers draw from these."""
        if not masks.rows:
            return
        device = self._masks.device
        rows = torch.empty(len(masks.rows), dtype=torch.int64, device=device)
        words = torch.empty(masks.words.shape, dtype=torch.int32, device=device)
        upload(rows, np.array(masks.rows, dtype=np.int64))
        upload(words, masks.words)
        self._masks.index_copy_(0, rows, words)
