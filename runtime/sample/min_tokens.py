"""Sampling stage for `min_tokens`: bans tokens that end the sequence until the minimum number of tokens is sampled."""

from __future__ import annotations

import numpy as np
import torch

from ops.sampling import tables
from ops.transfer import upload
from runtime.batch import RowBinding
from runtime.sample.stage import Record

MAX_STOP_TOKEN_IDS = 1024  # stop ids of one request


class MinTokens:
    def __init__(self, ban_ids: torch.Tensor, eos_token_ids: frozenset[int]) -> None:
        """Create the stage. ban_ids [R, MAX_STOP_TOKEN_IDS + number of EOS ids] int32."""
        self._ban_ids = ban_ids
        self._eos_token_ids = eos_token_ids

    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        """Write the banned ids of a row. Raises ValueError if there are too many."""
        params = binding.params
        banned = params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_token_ids)
        if not params.min_tokens or not banned:
            return
        if len(banned) > self._ban_ids.shape[1]:
            raise ValueError(f"{len(banned)} ids end the sequence; the maximum is {self._ban_ids.shape[1]}")
        record.words[tables.FLAGS] |= tables.BANNED
        record.words[tables.NUM_BANS] = len(banned)
        record.words[tables.FREE_FROM] = len(binding.prompt_ids) + params.min_tokens
        upload(self._ban_ids[row, : len(banned)], np.array(sorted(banned), dtype=np.int32))
