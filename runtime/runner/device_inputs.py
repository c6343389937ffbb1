"""Device inputs: what a step reads, at the addresses that captured graphs know, filled by one upload and one kernel.

The host packs a step into pinned memory; several such buffers take turns, so a step is packed while those before it still
run. Block tables and last sampled ids live on the device; the host keeps a copy of the tables to tell slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle

import numpy as np
import torch

import ops
from runtime.batch import ScheduledRow
from runtime.kv.layout import KVLayout
from runtime.runner.host_tables import HostTables
from runtime.runner.step_inputs import StepInputs

_Words = np.ndarray[tuple[int], np.dtype[np.int32]]
_UPDATES = 1 << 14  # table entries of one upload; a step that has more takes several


@dataclass(frozen=True, slots=True)
class StepShape:
    """`num_tokens` and `num_lines` with padding. `uniform`: every line decodes one token behind what earlier steps wrote."""

    num_tokens: int
    num_lines: int
    uniform: bool


def spans_of(rows: Sequence[ScheduledRow]) -> tuple[tuple[int, int, int], ...]:
    """(start, end, context length) of each row's tokens in the step."""
    stops = accumulate(row.num_tokens for row in rows)
    return tuple((stop - row.num_tokens, stop, row.end) for row, stop in zip(rows, stops, strict=True))


class DeviceInputs:
    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, max_model_len: int, layout: KVLayout, steps_in_flight: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._tables = HostTables(layout, max_num_seqs, max_model_len)

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        tokens, lines = max_num_tokens, max_num_seqs
        self._tensors = ops.StepTensors(
            ids=zeros(torch.int64, tokens), positions=zeros(torch.int64, tokens),
            slots=zeros(torch.int64, layout.num_tables, tokens),
            rows=zeros(torch.int32, lines), context_lens=zeros(torch.int32, lines),
            sample_rows=zeros(torch.int32, lines), query_starts=zeros(torch.int32, lines + 1),
            sample_positions=zeros(torch.int64, lines), last_tokens=zeros(torch.int64, lines),
            last_ids=zeros(torch.int64, lines), block_tables=zeros(torch.int32, *self._tables.entries.shape),
        )  # fmt: skip
        capacity = (2 + layout.num_tables) * tokens + 4 * lines + 3 * _UPDATES
        self._device_packed = zeros(torch.int32, capacity)
        # One more than can be under way: the upload of the oldest has run when its turn comes again.
        self._packed = cycle(
            [
                torch.zeros(capacity, dtype=torch.int32, pin_memory=device.type == "cuda")
                for _ in range(steps_in_flight + 1)
            ]
        )

    @property
    def last_ids(self) -> torch.Tensor:
        return self._tensors.last_ids

    @property
    def sample_positions(self) -> torch.Tensor:
        """Of the step filled last, a line each."""
        return self._tensors.sample_positions

    def fill(self, rows: Sequence[ScheduledRow], shape: StepShape) -> None:
        """Enqueue everything that `rows` bring, padded to `shape`: what `view` shows until the next call's work runs."""
        num_tokens = sum(row.num_tokens for row in rows)
        tables, indices, values = self._updates(rows)
        while len(tables) > _UPDATES:
            first = [tables[:_UPDATES], indices[:_UPDATES], values[:_UPDATES]]
            self._unpack(torch.tensor(first, dtype=torch.int32).view(-1), 0, 0, _UPDATES, StepShape(0, 0, False))
            tables, indices, values = tables[_UPDATES:], indices[_UPDATES:], values[_UPDATES:]
        parts: list[_Words | list[int]] = [*self._pack(rows, num_tokens), tables, indices, values]
        pinned = next(self._packed)
        host, at = pinned.numpy(), 0
        for part in parts:
            host[at : at + len(part)] = part
            at += len(part)
        self._unpack(pinned[:at], num_tokens, len(rows), len(tables), shape)

    def view(self, shape: StepShape, spans: tuple[tuple[int, int, int], ...] | None) -> StepInputs:
        """`spans` None: for any lines, which is what a captured graph sees."""
        tensors, tokens, lines = self._tensors, shape.num_tokens, shape.num_lines
        first_state = self._tables.first_state
        query_starts, context_lens, rows = (
            tensors.query_starts[: lines + 1], tensors.context_lens[:lines], tensors.rows[:lines]
        )  # fmt: skip
        return StepInputs(
            ids=tensors.ids[:tokens],
            positions=tensors.positions[:tokens],
            slots=(*tensors.slots[:first_state, :tokens], *tensors.slots[first_state:, :lines]),
            logit_tokens=None if shape.uniform else tensors.last_tokens[:lines],
            sample_rows=tensors.sample_rows[:lines],
            sample_positions=tensors.sample_positions[:lines],
            metas=tuple(
                ops.AttentionMeta(
                    query_starts=query_starts,
                    context_lens=context_lens,
                    block_tables=table,
                    max_query_len=1 if shape.uniform else max(2, tokens),
                    max_context_len=self._max_model_len,
                    rows=rows,
                    spans=spans,
                    uniform=shape.uniform,
                )
                for table in tensors.block_tables
            ),
        )

    def _updates(self, rows: Sequence[ScheduledRow]) -> tuple[list[int], list[int], list[int]]:
        """New entries of the block tables: which of all tables of all rows, index, block id. The host's copy has them when this
        returns."""
        tables: list[int] = []
        indices: list[int] = []
        values: list[int] = []
        for table, row, first, ids in self._tables.write(rows):
            tables.extend([table * self._max_num_seqs + row] * len(ids))
            indices.extend(range(first, first + len(ids)))
            values.extend(ids)
        return tables, indices, values

    def _pack(self, rows: Sequence[ScheduledRow], num_tokens: int) -> list[_Words]:
        ids: list[int] = []
        for row in rows:
            ids.extend(row.token_ids)
            if len(row.token_ids) < row.num_tokens:
                ids.append(-1 - row.row)  # what this row sampled last, which only the device knows
        facts = np.array(
            [(row.row, row.num_tokens, row.end, row.samples and not row.masked) for row in rows], np.int32
        ).T
        row_ids, spans, ends = facts[0], facts[1], facts[2]
        if num_tokens == len(rows):
            positions, token_rows, starts = ends - 1, row_ids, np.arange(len(rows), dtype=np.int32)
        else:
            stops = np.cumsum(spans, dtype=np.int32)
            starts = stops - spans
            positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(ends - stops, spans)
            token_rows = np.repeat(row_ids, spans)
        slots = self._tables.slots(token_rows, positions)
        states = self._tables.states(row_ids)
        if len(states):  # one a line, which there are no more of than tokens; the rest is padding, as behind the tokens
            states = np.pad(states, ((0, 0), (0, num_tokens - len(rows))), constant_values=-1)
        return [np.array(ids, np.int32), positions, slots.ravel(), states.ravel(), row_ids, starts, ends, facts[3]]

    def _unpack(
        self, packed: torch.Tensor, num_tokens: int, num_lines: int, num_updates: int, shape: StepShape
    ) -> None:
        self._device_packed[: len(packed)].copy_(packed, non_blocking=True)
        ops.unpack(
            self._device_packed, self._tensors, num_tokens=num_tokens, num_lines=num_lines, num_updates=num_updates,
            padded_tokens=shape.num_tokens, padded_lines=shape.num_lines,
        )  # fmt: skip
