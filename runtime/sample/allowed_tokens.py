"""Allowed tokens: nothing else can be drawn."""

from __future__ import annotations

import numpy as np
import torch

from ops.sampling import tables
from runtime.batch import RowBinding
from runtime.sample.stage import Record, upload


class AllowedTokens:
    def __init__(self, masks: torch.Tensor) -> None:
        """masks [R, V / 32 up] int32."""
        self._masks = masks

    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        allowed = binding.params.allowed_token_ids
        if allowed is None:
            return
        bits = np.zeros((self._masks.shape[1], 32), dtype=np.uint8)
        bits.reshape(-1)[list(allowed)] = 1
        record.words[tables.FLAGS] |= tables.MASKED
        upload(self._masks[row], np.packbits(bits, axis=1, bitorder="little").view("<i4")[:, 0].copy())
