"""Sampling stage that adds a constant to the logits of chosen tokens (`logit_bias`)."""

from __future__ import annotations

import numpy as np
import torch

from ops.sampling import tables
from ops.transfer import upload
from runtime.batch import RowBinding
from runtime.sample.stage import Record

MAX_BIASES = 1024  # biased tokens of one request


class LogitBias:
    def __init__(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Create the stage with tables `ids` [R, MAX_BIASES] int32 and `values` [R, MAX_BIASES] float32."""
        self._ids = ids
        self._values = values

    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        """Write the biases of a row. Raises ValueError if there are more than MAX_BIASES."""
        bias = sorted(binding.params.logit_bias.items())
        if not bias:
            return
        if len(bias) > self._ids.shape[1]:
            raise ValueError(f"{len(bias)} tokens in logit_bias; the maximum is {self._ids.shape[1]}")
        record.words[tables.FLAGS] |= tables.BIASED
        record.words[tables.NUM_BIASES] = len(bias)
        upload(self._ids[row, : len(bias)], np.array([token for token, _ in bias], dtype=np.int32))
        upload(self._values[row, : len(bias)], np.array([value for _, value in bias], dtype=np.float32))
