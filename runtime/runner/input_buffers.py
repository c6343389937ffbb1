"""Input buffers: what a step reads, laid out for the model, and the per-row tables that live from step to step.

`last_ids` holds what each row sampled last, so the next step's input never waits for the host. Written in launch order by
the thread that computes, hence always consistent with the step that reads."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

import ops
from runtime.batch import ScheduledBatch
from runtime.kv.layout import KVLayout
from runtime.runner.host_tables import HostTables
from runtime.runner.step_inputs import StepInputs


class InputBuffers:
    def __init__(self, max_num_seqs: int, max_model_len: int, layout: KVLayout) -> None:
        self._block_size = layout.kernel_block_size
        self.last_ids = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._tables = HostTables(layout, max_num_seqs, max_model_len)
        self._block_tables = list(torch.from_numpy(self._tables.entries))  # the same memory

    def fill(self, batch: ScheduledBatch) -> StepInputs:
        rows = batch.rows
        deque(self._tables.write(rows), maxlen=0)
        spans = np.array([row.num_tokens for row in rows])
        ends = np.cumsum(spans)
        row_ids = np.array([row.row for row in rows])
        context_lens = np.array([row.end for row in rows], dtype=np.int32)
        positions = np.arange(batch.num_tokens) + np.repeat(context_lens - ends, spans)
        slots = self._tables.slots(np.repeat(row_ids, spans), positions)
        states = self._tables.states(row_ids).astype(np.int64)
        max_context = int(context_lens.max())
        sampling = [index for index, row in enumerate(rows) if row.samples]
        query_starts = torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
        lens, lines = torch.from_numpy(context_lens), torch.from_numpy(row_ids)
        num_entries, longest = -(-max_context // self._block_size), int(spans.max())
        return StepInputs(
            ids=self._ids(batch, ends),
            positions=torch.from_numpy(positions),
            slots=tuple(torch.from_numpy(each) for each in (*slots, *states)),
            logit_tokens=torch.from_numpy(ends[sampling] - 1),
            sample_rows=torch.tensor([rows[index].row for index in sampling], dtype=torch.int32),
            sample_positions=torch.tensor([rows[index].end for index in sampling], dtype=torch.int64),
            metas=tuple(
                ops.AttentionMeta(query_starts, lens, table[lines, :num_entries], longest, max_context)
                for table in self._block_tables
            ),
        )

    def _ids(self, batch: ScheduledBatch, ends: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
        """Known ids from the batch; the one that a row lacks from what it sampled last."""
        flat: list[int] = []
        late_tokens: list[int] = []
        late_rows: list[int] = []
        for row, end in zip(batch.rows, ends, strict=True):
            flat.extend(row.token_ids)
            if len(row.token_ids) < row.num_tokens:
                flat.append(0)
                late_tokens.append(int(end) - 1)
                late_rows.append(row.row)
        ids = torch.tensor(flat, dtype=torch.int64)
        if late_rows:
            ids[late_tokens] = self.last_ids[late_rows]
        return ids
