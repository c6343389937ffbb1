"""Captured steps: which steps a graph serves, its inputs uploaded and it replayed; the rest is the runner's."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.batch import Pool, ScheduledRow
from runtime.platform.graph_pool import GraphPool
from runtime.runner.device_inputs import DeviceInputs, StepShape
from runtime.runner.runner import Computed


class CapturedSteps:
    def __init__(self, inputs: DeviceInputs, pool: GraphPool) -> None:
        self._inputs = inputs
        self._pool = pool

    def replay(self, rows: tuple[ScheduledRow, ...]) -> Computed | None:
        if not serves(rows):
            return None
        shape = StepShape.of(rows)
        found = self._pool.find(shape.num_tokens, shape.num_rows, uniform=shape.uniform, drafts=shape.drafts)
        if found is None:
            return None
        self._inputs.upload(rows, found)
        sampled = self._pool.replay(found)
        return Computed.by_token(rows, sampled) if found.drafts else Computed.of(rows, sampled)


def serves(rows: Sequence[ScheduledRow]) -> bool:
    """Whether `rows` want no more of a graph than draws."""
    return all(row.prompt_logprobs is None and type(row.work) is not Pool for row in rows)
