"""Stage: one concern of the sampler, with its own per-row state in the tables. A new sampling feature is one more of these.

The kernels behind `ops.sample` carry the stages out; a stage says what a row asks of them. It writes while steps that read
its table may still run, so it writes in stream order, through `transfer.upload`, and only to the row that has a new tenant."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ops.sampling.tables import RECORD
from runtime.batch import RowBinding


class Record:
    """A row's record in the making: see ops/sampling/tables.py for its words. All zero means the largest logit."""

    def __init__(self) -> None:
        self.words: NDArray[np.int32] = np.zeros(RECORD, dtype=np.int32)
        self.floats: NDArray[np.float32] = self.words.view(np.float32)


class Stage(Protocol):
    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        """A new sequence has taken `row`: put what it asks into `record`, and what is longer into the stage's own table."""
        ...
