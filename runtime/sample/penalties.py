"""Sampling stage for presence, frequency and repetition penalties.

Presence and frequency (OpenAI): for tokens of the output, subtract `presence` once and `frequency` per occurrence. Repetition
(Keskar et al. 2019, CTRL): for tokens of prompt and output, divide positive logits and multiply negative ones. `ops.sample` counts
the tokens that it samples; a count stops at 32767."""

from __future__ import annotations

import numpy as np
import torch

from ops.sampling import tables
from ops.transfer import upload
from runtime.batch import RowBinding
from runtime.sample.stage import Record


class Penalties:
    def __init__(self, counts: torch.Tensor) -> None:
        """Create the stage. counts [R, V] int16: occurrences of each token. Only rows with penalties are written, since rows are
        long."""
        self._counts = counts

    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        params = binding.params
        if not params.penalized:
            return
        record.words[tables.FLAGS] |= tables.PENALIZED
        record.floats[tables.PRESENCE] = params.presence_penalty
        record.floats[tables.FREQUENCY] = params.frequency_penalty
        record.floats[tables.REPETITION] = params.repetition_penalty
        record.floats[tables.INVERSE_REPETITION] = 1.0 / params.repetition_penalty
        outputs = np.array(binding.output_ids, dtype=np.int64)
        counts = np.bincount(outputs, minlength=self._counts.shape[1])
        packed = np.minimum(counts, tables.MAX_COUNT).astype(np.int16)
        packed[np.array(binding.prompt_ids, dtype=np.int64)] |= np.int16(-0x8000)
        upload(self._counts[row], packed)
