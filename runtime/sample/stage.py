"""Sampler stage: one sampling feature with its per-row state in the tables. A new sampling feature is a new stage.

The kernels of `ops.sample` execute the stages; a stage writes a row's parameters. Earlier steps may still read the table, so
a stage writes in stream order, through `transfer.upload`, and only to the row of a new sequence."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ops.sampling.tables import RECORD
from runtime.batch import RowBinding


class Record:
    """A row's record under construction: see ops/sampling/tables.py for its words. All zero means greedy sampling."""

    def __init__(self) -> None:
        self.words: NDArray[np.int32] = np.zeros(RECORD, dtype=np.int32)
        self.floats: NDArray[np.float32] = self.words.view(np.float32)


class SamplerStage(Protocol):
    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        """Write the parameters of the sequence that now has `row` to `record`, and variable-length data to the stage's table."""
        ...
