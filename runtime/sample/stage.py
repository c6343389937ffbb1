"""Interface of sampling stages. A stage is one sampling feature, such as penalties, with its parameters of each row in tables.

A stage writes a row's parameters; kernels of `ops.sample` apply them. Earlier steps may still read the tables. A stage therefore
writes in stream order, through `transfer.upload`, and only to the row of a new sequence."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ops.sampling.tables import RECORD
from runtime.batch import RowBinding


class Record:
    """Record of a row's sampling parameters, before it is written to the device. Its words are described in ops/sampling/tables.py.
    All zero means greedy sampling."""

    def __init__(self) -> None:
        self.words: NDArray[np.int32] = np.zeros(RECORD, dtype=np.int32)
        self.floats: NDArray[np.float32] = self.words.view(np.float32)


class SamplerStage(Protocol):
    def bind(self, row: int, binding: RowBinding, record: Record) -> None:
        """Write the parameters of the new sequence of `row` to `record`, and data of variable length to the stage's own table."""
        ...
