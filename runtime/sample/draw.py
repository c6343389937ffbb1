"""Random draw of one token: temperature, min-p, top-k and top-p in this order, each applied to the result of the previous one, then
the draw.

The random number is a hash of (seed, position, token id), and each logits row is independent. A request therefore draws the same
tokens alone and in any batch. Greedy rows take the largest logit. A filter keeps or drops equal logits together, so their order in
the vocabulary has no effect."""

from __future__ import annotations

import math

import numpy as np

from ops.sampling import tables
from runtime.batch import RowBinding
from runtime.sample.stage import Record


class Draw:
    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        params = binding.params
        if params.greedy or params.top_k == 1:  # top-k of 1 is the largest logit
            return
        words, floats = record.words, record.floats
        words[tables.FLAGS] |= tables.SAMPLED
        if params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
            words[tables.FLAGS] |= tables.FILTERED
        floats[tables.INVERSE_TEMPERATURE] = 1.0 / params.temperature
        words[tables.TOP_K] = min(params.top_k, 2**31 - 1)
        floats[tables.TOP_P] = params.top_p
        floats[tables.MIN_P_MARGIN] = params.temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        seed = np.array([binding.seed & (2**64 - 1)], dtype="<u8").view(np.int32)
        words[tables.SEED_LOW], words[tables.SEED_HIGH] = seed
