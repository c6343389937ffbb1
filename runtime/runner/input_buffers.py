"""Input buffers: what a step reads, laid out for the model, and the per-row tables that live from step to step.

`last_ids` holds what each row sampled last, so the next step's input never waits for the host. Written in launch order by
the thread that computes, hence always consistent with the step that reads. In numpy: behind a step, whose weights have filled
every cache, a first operation of torch takes as long as five of numpy."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

import numpy as np
import torch

import ops
from runtime.batch import ScheduledBatch
from runtime.kv.layout import KVLayout
from runtime.runner.host_tables import HostTables, Longs
from runtime.runner.step_inputs import StepInputs


class InputBuffers:
    def __init__(self, max_num_seqs: int, max_model_len: int, layout: KVLayout) -> None:
        self._block_size = layout.kernel_block_size
        self.last_ids = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._tables = HostTables(layout, max_num_seqs, max_model_len)
        self._last_ids: Longs = self.last_ids.numpy()  # the same memory

    def fill(self, batch: ScheduledBatch) -> StepInputs:
        rows = batch.rows
        deque(self._tables.write(rows), maxlen=0)
        # Lists where there is little to compute: a step has few tokens here, and a call of a library costs more than most.
        positions = np.array([position for row in rows for position in range(row.start, row.end)])
        slots = self._tables.slots(np.array([row.row for row in rows for _ in range(row.num_tokens)]), positions)
        ends = list(accumulate(row.num_tokens for row in rows))
        lines = np.array([row.row for row in rows])
        query_starts, context_lens = _int32([0, *ends]), _int32([row.end for row in rows])
        longest, max_context = max(row.num_tokens for row in rows), max(row.end for row in rows)
        num_entries = -(-max_context // self._block_size)
        states = self._tables.states(lines).astype(np.int64)
        sampling = [(row, end - 1) for row, end in zip(rows, ends, strict=True) if row.samples]
        return StepInputs(
            ids=torch.from_numpy(self._ids(batch, ends, lines)),
            positions=torch.from_numpy(positions),
            slots=tuple(map(torch.from_numpy, (*slots, *states))),
            logit_tokens=None if len(sampling) == ends[-1] else _int64([token for _, token in sampling]),
            sample_rows=_int32([row.row for row, _ in sampling]),
            sample_positions=_int64([row.end for row, _ in sampling]),
            metas=tuple(
                ops.AttentionMeta(
                    query_starts, context_lens, torch.from_numpy(table[lines, :num_entries]), longest, max_context
                )
                for table in self._tables.entries
            ),
        )

    def _ids(self, batch: ScheduledBatch, ends: list[int], lines: Longs) -> Longs:
        """Known ids from the batch; the one that a row lacks from what it sampled last."""
        flat: list[int] = []
        late_tokens: list[int] = []
        late_rows: list[int] = []
        for row, end in zip(batch.rows, ends, strict=True):
            flat.extend(row.token_ids)
            if len(row.token_ids) < row.num_tokens:
                flat.append(0)
                late_tokens.append(end - 1)
                late_rows.append(row.row)
        if len(late_rows) == len(flat):
            return self._last_ids[lines]
        ids = np.array(flat)
        if late_rows:
            ids[late_tokens] = self._last_ids[late_rows]
        return ids


def _int64(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int64))


def _int32(values: list[int]) -> torch.Tensor:
    if not values:  # a step may be pieces of prompts alone; and kernels refuse the strides of numpy's empty arrays
        return torch.empty(0, dtype=torch.int32)
    return torch.from_numpy(np.array(values, np.int32))
