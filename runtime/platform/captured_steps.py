"""Captured steps: which steps a graph serves, its inputs uploaded and it replayed; the rest is the runner's."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.batch import Pool, ScheduledRow
from runtime.platform.graph_pool import GraphPool
from runtime.runner.device_inputs import DeviceInputs, StepShape
from runtime.runner.runner import Sampled


class CapturedSteps:
    def __init__(self, inputs: DeviceInputs, pool: GraphPool) -> None:
        self._inputs = inputs
        self._pool = pool

    def replay(self, rows: tuple[ScheduledRow, ...]) -> Sampled | None:
        if not serves(rows):
            return None
        shape = StepShape.of(rows)
        found = self._pool.find(shape.num_tokens, shape.num_rows, uniform=shape.uniform)
        if found is None:
            return None
        self._inputs.upload(rows, found)
        return self._pool.replay(found)


def serves(rows: Sequence[ScheduledRow]) -> bool:
    """Whether each of `rows` wants at most one draw of a graph."""
    for row in rows:
        if row.prompt_logprobs is not None or type(row.work) is Pool:
            return False
        if row.num_tokens > 1 and row.draft_ids:
            return False
    return True
