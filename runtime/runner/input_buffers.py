"""Input buffers: what a step reads, laid out for the model, and the per-row tables that live from step to step.

`last_ids` holds what each row sampled last, so the next step's input never waits for the host. Written in launch order by
the thread that computes, hence always consistent with the step that reads."""

from __future__ import annotations

import numpy as np
import torch

import ops
from runtime.batch import ScheduledBatch
from runtime.runner.step_inputs import StepInputs


class InputBuffers:
    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.last_ids = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._block_tables = torch.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=torch.int32)
        self._tables = self._block_tables.numpy()  # same memory

    def fill(self, batch: ScheduledBatch) -> StepInputs:
        rows = batch.rows
        for row in rows:
            if row.new_block_ids:
                end = row.first_new_block + len(row.new_block_ids)
                self._tables[row.row, row.first_new_block : end] = row.new_block_ids
        spans = np.array([row.num_tokens for row in rows])
        ends = np.cumsum(spans)
        row_ids = np.array([row.row for row in rows])
        context_lens = np.array([row.end for row in rows], dtype=np.int32)
        positions = np.arange(batch.num_tokens) + np.repeat(context_lens - ends, spans)
        blocks = self._tables[np.repeat(row_ids, spans), positions // self.block_size]
        max_context = int(context_lens.max())
        sampling = [index for index, row in enumerate(rows) if row.samples]
        return StepInputs(
            ids=self._ids(batch, ends),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(blocks.astype(np.int64) * self.block_size + positions % self.block_size),
            logit_tokens=torch.from_numpy(ends[sampling] - 1),
            sample_rows=torch.tensor([rows[index].row for index in sampling], dtype=torch.int32),
            sample_positions=torch.tensor([rows[index].end for index in sampling], dtype=torch.int64),
            meta=ops.AttentionMeta(
                query_starts=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
                context_lens=torch.from_numpy(context_lens),
                block_tables=self._block_tables[torch.from_numpy(row_ids), : -(-max_context // self.block_size)],
                max_query_len=int(spans.max()),
                max_context_len=max_context,
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
