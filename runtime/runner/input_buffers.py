"""Input buffers: inputs of a step on a CPU, in the model's layout, and the per-row tables that persist between steps.

`last_ids` contains the last sampled id of each row and `num_computed` its number of computed tokens, so the next step does not
wait for the host. The worker thread writes them in launch order, so they match the step that reads them. They use numpy: after
a step, whose weights have filled the caches, a first torch operation takes as long as five numpy operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

import ops
from runtime.batch import Sample, ScheduledRow
from runtime.kv.kv_cache import LayerKV
from runtime.kv.layout import KVLayout
from runtime.models.forward_step import ForwardStep
from runtime.runner.host_tables import HostBlockTables, Int32s, Int64s
from runtime.runner.step_inputs import (
    StepInputs,
    inputs_with_drafts,
    rope_positions,
    seen_across,
    seen_in_chunks,
    token_types,
)


class InputBuffers:
    """Inputs of steps on a CPU. `kv_caches`: KV caches of the model's layers. `max_proposed`: maximum draft tokens per row."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, layout: KVLayout, kv_caches: Sequence[LayerKV] = (),
        max_proposed: int = 0,
    ) -> None:  # fmt: skip
        self._block_size, self._chunks = layout.kernel_block_size, layout.chunks(max_model_len)
        self._num_outputs = layout.num_outputs
        self._kv_caches = kv_caches
        self.last_ids = torch.zeros(max_num_seqs, dtype=torch.int64)
        self.num_computed = torch.zeros(max_num_seqs, dtype=torch.int64)
        self.draft_ids = torch.zeros((max_num_seqs, max_proposed), dtype=torch.int64)
        self._tables = HostBlockTables(layout, max_num_seqs, max_model_len)
        self._last_ids: Int64s = self.last_ids.numpy()  # the same memory
        self._num_computed: Int64s = self.num_computed.numpy()  # the same memory
        self._adapter_slots = np.full(max_num_seqs, -1, np.int32)  # by row
        self._rope_deltas = np.zeros(max_num_seqs, np.int64)  # by row
        self._had_adapters = self._had_deltas = False  # whether any row ever had one; otherwise the tables are not read

    def arranged(self, rows: tuple[ScheduledRow, ...]) -> tuple[ScheduledRow, ...]:
        return rows

    def fill(self, rows: tuple[ScheduledRow, ...]) -> StepInputs:
        self._tables.write(rows)
        row_ids = np.array([row.row for row in rows])
        lens = [row.num_tokens for row in rows]
        ends = list(accumulate(lens))
        num_tokens, longest = ends[-1], max(lens)
        starts = self._starts(rows, row_ids)
        if num_tokens == len(rows):
            contexts, positions, token_rows = starts + 1, starts, row_ids
        else:
            contexts = starts + lens
            positions = np.arange(num_tokens) + np.repeat(contexts - ends, lens)
            token_rows = np.repeat(row_ids, lens)
        self._num_computed[row_ids] = contexts
        slot_mapping, states = self._tables.slot_mapping(token_rows, positions), self._tables.states(row_ids)
        query_start_loc, seq_lens = _int32([0, *ends]), torch.from_numpy(contexts.astype(np.int32))
        max_seq_len = max(contexts.tolist())
        forward = ForwardStep(
            input_ids=torch.from_numpy(self._ids(rows, ends, row_ids)),
            positions=torch.from_numpy(positions),
            slot_mapping=tuple(map(torch.from_numpy, (*slot_mapping, *states))),
            attn_metadata=self._seen(
                [
                    ops.AttentionMeta(query_start_loc, seq_lens, torch.from_numpy(entries), longest, max_seq_len)
                    for entries in self._entries(row_ids, max_seq_len)
                ],
                positions,
                starts,
            ),
            kv_caches=self._kv_caches,
            token_type_ids=None if (kinds := token_types(rows)) is None else _int64(kinds),
            adapters=self._adapters(token_rows),
            rope_positions=self._rope_positions(rows, positions, token_rows),
        )
        if longest > 1 and any(row.draft_ids for row in rows):
            return inputs_with_drafts(forward, rows, self.num_computed, torch.from_numpy(row_ids), query_start_loc)
        sampling = [index for index, row in enumerate(rows) if type(row.work) is Sample]
        if len(sampling) == len(rows):
            logits_of, sample_positions = rows, torch.from_numpy(contexts)
        else:
            logits_of, sample_positions = tuple(rows[index] for index in sampling), _int64(contexts[sampling])
        return StepInputs(
            forward=forward,
            logits_of=logits_of,
            logit_tokens=None if len(sampling) == num_tokens else _int64([ends[index] - 1 for index in sampling]),
            sample_rows=_int32([-1 if row.masked else row.row for row in logits_of]),
            sample_positions=sample_positions,
            rows=torch.from_numpy(row_ids),
            query_start_loc=query_start_loc,
        )

    def _adapters(self, token_rows: Int64s) -> torch.Tensor | None:
        if not self._had_adapters:
            return None
        slots = self._adapter_slots[token_rows]
        return torch.from_numpy(slots) if slots.max() >= 0 else None

    def _rope_positions(
        self, rows: Sequence[ScheduledRow], positions: Int64s, token_rows: Int64s
    ) -> torch.Tensor | None:
        if not self._had_deltas:
            given = rope_positions(rows, positions)
            return None if given is None else torch.from_numpy(given)
        deltas = self._rope_deltas[token_rows]
        given = rope_positions(rows, positions + deltas)
        if given is None:
            return torch.from_numpy(positions + deltas) if deltas.any() else None
        return torch.from_numpy(given)

    def put_drafts(self, rows: torch.Tensor, nth: torch.Tensor, ids: torch.Tensor) -> None:
        self.draft_ids[rows, nth] = ids

    def behind(self, rows: torch.Tensor, ids: torch.Tensor, offset: torch.Tensor) -> ForwardStep:
        """Return a forward step of one more token for each of `rows`, without padding. See `Inputs.behind`."""
        row_ids: Int64s = rows.numpy()
        positions = self._num_computed[row_ids] + offset.numpy()
        max_seq_len = int(positions.max()) + 1
        query_start_loc = torch.arange(len(row_ids) + 1, dtype=torch.int32)
        seq_lens = torch.from_numpy((positions + 1).astype(np.int32))
        return ForwardStep(
            input_ids=ids,
            positions=torch.from_numpy(positions),
            slot_mapping=tuple(map(torch.from_numpy, self._tables.slot_mapping(row_ids, positions))),
            attn_metadata=self._seen(
                [
                    ops.AttentionMeta(query_start_loc, seq_lens, torch.from_numpy(entries), 1, max_seq_len)
                    for entries in self._entries(row_ids, max_seq_len)
                ],
                positions,
                positions,
            ),
            kv_caches=self._kv_caches,
        )

    def _entries(self, row_ids: Int64s, max_seq_len: int) -> Iterator[Int32s]:
        """Yield for each block table the entries that `row_ids` [B] attend to: [B, entries]."""
        for table, num_outputs in zip(self._tables.entries, self._num_outputs, strict=True):
            yield table[row_ids, : -(-(num_outputs or max_seq_len) // self._block_size)]

    def _seen(
        self, by_table: Sequence[ops.AttentionMeta], positions: Int64s, starts: Int64s
    ) -> tuple[ops.AttentionMeta, ...]:
        """Return attention metadata per block table, as the layers read it. `starts`: position of each row's first token."""

        def num_pieces(chunk: int) -> int:
            return int(len(starts) + np.sum(positions % chunk == 0) - np.sum(starts % chunk == 0))

        by_table = seen_in_chunks(by_table, self._chunks, torch.from_numpy(positions), self._block_size, num_pieces)
        return seen_across(by_table, self._num_outputs, len(positions))

    def _starts(self, rows: Sequence[ScheduledRow], row_ids: Int64s) -> Int64s:
        """Write new sequences and restarts to the tables. Return the position of each row's first token, [B]."""
        for row in rows:
            if row.binding is not None:
                self._num_computed[row.row] = row.binding.num_computed
                self._adapter_slots[row.row] = row.binding.adapter_slot
                self._rope_deltas[row.row] = row.binding.rope_delta
                self._had_adapters |= row.binding.adapter_slot >= 0
                self._had_deltas |= row.binding.rope_delta != 0
            elif row.restart >= 0:
                self._num_computed[row.row] = row.restart
        return self._num_computed[row_ids]

    def _ids(self, rows: Sequence[ScheduledRow], ends: list[int], row_ids: Int64s) -> Int64s:
        """Return the input ids of a step: known ids and draft tokens. If a row is one id short, insert its last sampled id."""
        flat: list[int] = []
        late_tokens: list[int] = []
        late_rows: list[int] = []
        drafted: list[ScheduledRow] = []
        stops: list[int] = []
        for row, end in zip(rows, ends, strict=True):
            flat.extend(row.token_ids)
            if len(row.token_ids) + len(row.draft_ids) < row.num_tokens:
                flat.append(0)
                late_tokens.append(end - 1 - len(row.draft_ids))
                late_rows.append(row.row)
            if row.draft_ids:
                flat.extend(row.draft_ids)
                if row.guessed_on_device:
                    drafted.append(row)
                    stops.append(end)
        if len(late_rows) == len(flat):
            return self._last_ids[row_ids]
        ids = np.array(flat)
        if late_rows:
            ids[late_tokens] = self._last_ids[late_rows]
        for row, stop in zip(drafted, stops, strict=True):
            num = len(row.draft_ids)
            ids[stop - num : stop] = self.draft_ids[row.row, :num]
        return ids


def _int64(values: list[int] | Int64s) -> torch.Tensor:
    if not len(values):  # a step may have prompt chunks only, and kernels reject the strides of empty numpy arrays
        return torch.empty(0, dtype=torch.int64)
    return torch.from_numpy(np.array(values, np.int64))


def _int32(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int32)) if values else torch.empty(0, dtype=torch.int32)
