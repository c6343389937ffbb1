"""Device inputs: tensors that a step reads. They have fixed addresses, for captured graphs. One upload and two kernels fill them.

The host packs a step into pinned memory. Several buffers are used in rotation, so a step can be packed while earlier ones run.
Block tables, computed token counts and last sampled ids are stored on the device only. The device computes positions, slots and
lengths from them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle

import numpy as np
import torch
from torch import Tensor

import ops
from ops.sampling.tables import Drafts
from ops.transfer import index_on, is_remote
from runtime.batch import SAMPLE, RowBinding, Sample, ScheduledRow, columns
from runtime.kv.kv_cache import LayerKV
from runtime.kv.layout import KVLayout
from runtime.models.forward_step import ForwardStep
from runtime.runner.host_tables import TableUpdates
from runtime.runner.step_inputs import StepInputs, inputs_with_drafts, seen_across, seen_in_chunks, token_types

_Int32s = np.ndarray[tuple[int], np.dtype[np.int32]]
_Part = list[int] | _Int32s
_UPDATES = 1 << 14  # table entries per upload; a larger step takes several uploads


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shape of a captured step. `num_tokens` and `num_rows` include padding. `uniform`: every row computes one token and no row
    has a new sequence. `drafts`: at least one row has draft tokens. `adapters`: at least one row has an adapter."""

    num_tokens: int
    num_rows: int
    uniform: bool
    drafts: bool = False
    adapters: bool = False

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], *, adapters: bool = False) -> StepShape:
        """Return the shape of `rows` without padding. A step with new sequences is not uniform: they may share blocks that
        other rows fill in the same step, so keys and values must be stored before they are read."""
        uniform = all(row.num_tokens == 1 and row.binding is None for row in rows)
        if uniform:
            return cls(len(rows), len(rows), uniform, adapters=adapters)
        drafts = any(row.draft_ids for row in rows)
        return cls(sum(row.num_tokens for row in rows), len(rows), uniform, drafts, adapters)


def spans_of(rows: Sequence[ScheduledRow]) -> tuple[tuple[int, int, int], ...]:
    """Return (start, end, context length) of each row's tokens in the step. The context length is an upper bound. It is exact
    if no draft tokens of the row are in flight, as in a new prompt."""
    stops = accumulate(row.num_tokens for row in rows)
    return tuple((stop - row.num_tokens, stop, row.end) for row, stop in zip(rows, stops, strict=True))


def _by_token(rows: Sequence[ScheduledRow], padded: int) -> _Int32s:
    """Return [3 * padded] int32, per token: the row that samples after it or -1; 1 if it is a draft token, else 0; its row."""
    facts = np.full((3, padded), -1, np.int32)
    owners, guesses, table_rows = facts
    guesses.fill(0)
    stop = 0
    for row in rows:
        first, stop = stop, stop + row.num_tokens
        table_rows[first:stop] = row.row
        if isinstance(row.work, Sample):
            owners[stop - 1 - row.work.num_drafts : stop] = -1 if row.work.masked else row.row
            guesses[stop - row.work.num_drafts : stop] = 1
    return facts.reshape(-1)


class DeviceInputs:
    """Inputs of steps at fixed device addresses. `kv_caches`: KV caches of the model's layers. `max_proposed`: maximum number
    of draft tokens per row that the device makes."""

    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, max_model_len: int, layout: KVLayout, steps_in_flight: int,
        device: torch.device, kv_caches: Sequence[LayerKV] = (), max_proposed: int = 0, adapters: bool = False,
        axes: bool = False,
    ) -> None:  # fmt: skip
        """Allocate the buffers. `adapters`: rows may have adapters. `axes`: the rotary embedding has three axes."""
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_proposed = max_proposed
        self._kv_caches = kv_caches
        self._updates = TableUpdates(layout, max_num_seqs, max_model_len)
        self._block_size, self._chunks = layout.kernel_block_size, layout.chunks(max_model_len)
        self._num_outputs = layout.num_outputs

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        tokens, rows = max_num_tokens, max_num_seqs
        self._tensors = ops.StepTensors(
            input_ids=zeros(torch.int64, tokens), positions=zeros(torch.int64, tokens),
            slot_mapping=zeros(torch.int64, layout.num_tables, tokens),
            rows=zeros(torch.int32, rows), seq_lens=zeros(torch.int32, rows),
            sample_rows=zeros(torch.int32, rows), query_start_loc=zeros(torch.int32, rows + 1),
            sample_positions=zeros(torch.int64, rows), logit_tokens=zeros(torch.int64, rows),
            last_ids=zeros(torch.int64, rows * (1 + max_proposed) + 1), num_computed=zeros(torch.int32, rows),
            block_tables=zeros(torch.int32, *self._updates.shape),
            num_state_tables=layout.num_state_tables, block_size=layout.kernel_block_size,
        )  # fmt: skip
        # Adapter slot of each row, with an extra -1 at the end for padding (row -1); and the values that were uploaded last.
        self._adapter_slots = zeros(torch.int32, rows + 1).fill_(-1) if adapters else None
        self._entered_slots = [-1] * rows
        self._rope_deltas = zeros(torch.int64, rows + 1) if axes else None
        self._entered_deltas = [0] * rows
        # A step with draft tokens starts with its data by token (`_by_token`). The data that ops.unpack reads follows.
        capacity = 4 * tokens + 4 * rows + 3 * _UPDATES
        self._device_packed = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        # One more than the steps in flight, so the upload from the oldest buffer has run before the buffer is reused.
        pinned = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=is_remote(device)) for _ in range(steps_in_flight + 1)
        ]
        self._packed = cycle([(each, each.numpy()) for each in pinned])

    @property
    def last_ids(self) -> Tensor:
        return self._tensors.last_ids[: self._max_num_seqs]

    @property
    def draft_ids(self) -> Tensor:
        return self._tensors.last_ids[self._max_num_seqs : -1].view(self._max_num_seqs, self._max_proposed)

    @property
    def num_computed(self) -> Tensor:
        return self._tensors.num_computed

    @property
    def sample_positions(self) -> Tensor:
        """Positions of the sampled tokens of the step that was filled last, one per logits row."""
        return self._tensors.sample_positions

    def arranged(self, rows: tuple[ScheduledRow, ...]) -> tuple[ScheduledRow, ...]:
        """Return `rows` sorted by context length, longest first. Attention processes rows in this order, and a long row at the
        end would run alone."""
        return tuple(sorted(rows, key=lambda row: row.start + row.num_tokens, reverse=True))

    def shape_of(self, rows: Sequence[ScheduledRow]) -> StepShape:
        """Return the shape of `rows` without padding."""
        slots = self._entered_slots
        adapters = self._adapter_slots is not None and any(
            (slots[row.row] if row.binding is None else row.binding.adapter_slot) >= 0 for row in rows
        )
        return StepShape.of(rows, adapters=adapters)

    def fill(self, rows: tuple[ScheduledRow, ...]) -> StepInputs:
        shape = self.shape_of(rows)
        all_alike = replace(shape, drafts=False)
        self.upload(rows, all_alike)
        step = self.placed(all_alike, rows)
        if not shape.drafts:
            return step
        return inputs_with_drafts(step.forward, rows, self.num_computed, step.rows, step.query_start_loc)

    def upload(self, rows: Sequence[ScheduledRow], shape: StepShape) -> None:
        """Enqueue the upload of all data of `rows`, padded to `shape`. Call `placed` before the next upload."""
        num_tokens = len(rows) if shape.uniform else sum([row.num_tokens for row in rows])
        _enter(rows, lambda binding: binding.adapter_slot, self._entered_slots, self._adapter_slots)
        _enter(rows, lambda binding: binding.rope_delta, self._entered_deltas, self._rope_deltas)
        tables, indices, values = self._new_entries(rows)
        while len(tables) > _UPDATES:
            first = [tables[:_UPDATES], indices[:_UPDATES], values[:_UPDATES]]
            self._unpack(torch.tensor(first, dtype=torch.int32).view(-1), 0, 0, _UPDATES, StepShape(0, 0, False))
            tables, indices, values = tables[_UPDATES:], indices[_UPDATES:], values[_UPDATES:]
        packed = _pack_uniform(rows) if shape.uniform else self._pack(rows)
        parts: list[_Part] = [*packed, tables, indices, values]
        if shape.drafts:
            parts.insert(0, _by_token(rows, shape.num_tokens))
        pinned, numbers = next(self._packed)
        num = _written(parts, numbers)
        self._unpack(pinned[:num], num_tokens, len(rows), len(tables), shape)

    def placed(self, shape: StepShape, rows: tuple[ScheduledRow, ...] | None) -> StepInputs:
        """Enqueue the computation of positions and slots of the last uploaded step, and return its StepInputs.

        If `rows` is None, the inputs are those of a captured graph, valid for any rows. In a step with draft tokens, every
        token has logits and is a separate request for attention. Single queries are faster there than a few per row. Recurrent
        layers still use one state per row."""
        ops.place_tokens(
            self._tensors, padded_tokens=shape.num_tokens, padded_rows=shape.num_rows, uniform=shape.uniform
        )
        tensors, num_tokens, num_rows = self._tensors, shape.num_tokens, shape.num_rows
        first_state = len(tensors.slot_mapping) - tensors.num_state_tables
        spans = None if rows is None else spans_of(rows)
        kinds = None if rows is None else token_types(rows)
        positions = tensors.positions[:num_tokens]
        by_row = ops.AttentionMeta(
            query_start_loc=tensors.query_start_loc[: num_rows + 1],
            seq_lens=tensors.seq_lens[:num_rows],
            block_tables=tensors.block_tables[0],
            max_query_len=1 if shape.uniform else max(2, num_tokens),
            max_seq_len=self._max_model_len,
            rows=tensors.rows[:num_rows],
            spans=spans,
            uniform=shape.uniform,
        )
        by_table = [by_row] * len(tensors.block_tables)
        if shape.drafts:
            sample_rows, is_guess, table_rows = self._device_packed[: 3 * num_tokens].view(3, num_tokens)
            starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=table_rows.device)
            by_table[:first_state] = [
                replace(
                    by_row,
                    query_start_loc=starts.minimum(by_row.query_start_loc[-1]),
                    seq_lens=(positions + 1).int(),
                    max_query_len=1,
                    rows=table_rows,
                )
            ] * first_state
        forward = ForwardStep(
            input_ids=tensors.input_ids[:num_tokens],
            positions=positions,
            slot_mapping=(
                *tensors.slot_mapping[:first_state, :num_tokens],
                *tensors.slot_mapping[first_state:, :num_rows],
            ),
            attn_metadata=self._seen(
                [replace(meta, block_tables=table) for meta, table in zip(by_table, tensors.block_tables, strict=True)],
                positions,
            ),
            kv_caches=self._kv_caches,
            token_type_ids=None if kinds is None else index_on(self._device_packed.device, kinds),
            adapters=self._slots_of_tokens(by_row, num_tokens) if shape.adapters else None,
            rope_positions=self._rope_positions(rows, positions, by_row),
        )
        if shape.drafts:
            return StepInputs(
                forward=forward,
                logits_of=rows or (),
                logit_tokens=None,
                sample_rows=sample_rows,
                sample_positions=positions + 1,
                rows=tensors.rows[:num_rows],
                query_start_loc=by_row.query_start_loc,
                drafts=Drafts(torch.where(is_guess > 0, forward.input_ids, -1), self.num_computed),
            )
        return StepInputs(
            forward=forward,
            logits_of=rows or (),
            logit_tokens=None if shape.uniform else tensors.logit_tokens[:num_rows],
            sample_rows=tensors.sample_rows[:num_rows],
            sample_positions=tensors.sample_positions[:num_rows],
            rows=tensors.rows[:num_rows],
            query_start_loc=by_row.query_start_loc,
        )

    def put_drafts(self, rows: Tensor, nth: Tensor, ids: Tensor) -> None:
        places = self._tensors.last_ids
        entries = self._max_num_seqs + rows * self._max_proposed + nth
        places[torch.where(rows >= 0, entries, len(places) - 1)] = ids  # the last entry receives ids that nothing reads

    def behind(self, rows: Tensor, ids: Tensor, offset: Tensor) -> ForwardStep:
        placed = ops.place_behind(self._tensors, rows, offset)
        return ForwardStep(
            input_ids=ids,
            positions=placed.positions,
            slot_mapping=(*placed.slot_mapping,),
            attn_metadata=self._seen(
                [
                    ops.AttentionMeta(
                        query_start_loc=placed.query_start_loc,
                        seq_lens=placed.seq_lens,
                        block_tables=table,
                        max_query_len=1,
                        max_seq_len=self._max_model_len,
                        rows=placed.rows,
                        uniform=True,
                    )
                    for table in self._tensors.block_tables
                ],
                placed.positions,
            ),
            kv_caches=self._kv_caches,
        )

    def _seen(self, by_table: list[ops.AttentionMeta], positions: Tensor) -> tuple[ops.AttentionMeta, ...]:
        def num_pieces(chunk: int) -> int:
            return ops.max_pieces(len(positions), len(by_table[0].seq_lens), chunk)

        seen = seen_in_chunks(by_table, self._chunks, positions, self._block_size, num_pieces)
        return seen_across(seen, self._num_outputs, len(positions))

    def _slots_of_tokens(self, by_row: ops.AttentionMeta, num_tokens: int) -> Tensor:
        """Return the adapter slot of each token, [T] int32; -1 for tokens without an adapter and for padding."""
        assert self._adapter_slots is not None
        return _of_tokens(self._adapter_slots, by_row, num_tokens)

    def _rope_positions(
        self, rows: Sequence[ScheduledRow] | None, positions: Tensor, by_row: ops.AttentionMeta
    ) -> Tensor | None:
        """Return the rotary positions of tokens, [T], or [3, T] if a row has M-RoPE positions. None without M-RoPE."""
        if self._rope_deltas is None:
            return None
        placed = positions + _of_tokens(self._rope_deltas, by_row, len(positions))
        tokens: list[int] = []
        given = []
        for row, stop in zip(rows or (), accumulate(row.num_tokens for row in rows or ()), strict=True):
            if row.media is not None and row.media.rope_positions is not None:
                tokens.extend(range(stop - row.num_tokens, stop))
                given.append(row.media.rope_positions)
        if not tokens:
            return placed
        by_axis = placed.repeat(3, 1)
        by_axis[:, index_on(placed.device, tokens)] = index_on(placed.device, np.concatenate(given, axis=1).tolist())
        return by_axis

    def _new_entries(self, rows: Sequence[ScheduledRow]) -> tuple[list[int], list[int], list[int]]:
        """Return new block table entries as three lists: number of the table row, entry index in it, and block id."""
        tables: list[int] = []
        indices: list[int] = []
        values: list[int] = []
        for table, row, first, ids in self._updates.of(rows):
            tables.extend([table * self._max_num_seqs + row] * len(ids))
            indices.extend(range(first, first + len(ids)))
            values.extend(ids)
        return tables, indices, values

    def _pack(self, rows: Sequence[ScheduledRow]) -> list[_Part]:
        ids: list[int] = []
        for row in rows:
            ids.extend(row.token_ids)
            if len(row.token_ids) + len(row.draft_ids) < row.num_tokens:
                ids.append(-1 - row.row)  # stands for the id that this row sampled last, which is on the device only
            if row.guessed_on_device:
                first = -1 - self._max_num_seqs - self._max_proposed * row.row
                ids.extend(range(first, first - len(row.draft_ids), -1))
            else:
                ids.extend(row.draft_ids)
        starts = [0, *accumulate(row.num_tokens for row in rows)]
        counts = [row.restart if row.binding is None else row.binding.num_computed for row in rows]
        samples = [int(type(work := row.work) is Sample and not work.masked) for row in rows]
        return [ids, [row.row for row in rows], starts[:-1], counts, samples]

    def _unpack(self, packed: Tensor, num_tokens: int, num_rows: int, num_updates: int, shape: StepShape) -> None:
        self._device_packed[: len(packed)].copy_(packed, non_blocking=True)
        begin = 3 * shape.num_tokens if shape.drafts else 0
        ops.unpack(
            self._device_packed[begin:], self._tensors, num_tokens=num_tokens, num_rows=num_rows, num_updates=num_updates,
            padded_tokens=shape.num_tokens, padded_rows=shape.num_rows,
        )  # fmt: skip


def _written(parts: Sequence[_Part], to: _Int32s) -> int:
    """Copy `parts` into `to` one after another; return the total length. A list of 512 takes 4 us, as a numpy array 14 us."""
    at = 0
    for part in parts:
        if isinstance(part, list):
            struct.pack_into(f"{len(part)}i", to.data, 4 * at, *part)
        else:
            to[at : at + len(part)] = part
        at += len(part)
    return at


def _pack_uniform(rows: Sequence[ScheduledRow]) -> list[_Part]:
    """Pack the rows of a uniform step. Returns the same as `DeviceInputs._pack`, but faster."""
    of, num = columns(rows), len(rows)
    table_rows = np.array(of.row, np.int32)
    samples = np.ones(num, np.int32)
    if of.work.count(SAMPLE) < num:
        samples[:] = [row.samples and not row.masked for row in rows]
    ids = -1 - table_rows
    if any(of.token_ids):
        for place, token_ids in enumerate(of.token_ids):
            if token_ids:
                ids[place] = token_ids[0]
    return [ids, table_rows, np.arange(num, dtype=np.int32), np.array(of.restart, np.int32), samples]


def _of_tokens(table: Tensor, by_row: ops.AttentionMeta, num_tokens: int) -> Tensor:
    """Return the entry of `table` [max_num_seqs + 1] for each token's row, [T]. Padding tokens get the last entry."""
    rows = by_row.rows
    assert rows is not None
    if by_row.uniform:
        return table[rows]
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=table.device)
    place = torch.searchsorted(by_row.query_start_loc, tokens, right=True) - 1
    inside = place < len(rows)
    return torch.where(inside, table[rows[place.clamp(max=len(rows) - 1)]], table[-1])


def _enter(
    rows: Sequence[ScheduledRow], value_of: Callable[[RowBinding], int], entered: list[int], table: Tensor | None
) -> None:
    """Write `value_of(binding)` of each new sequence to `entered` and `table`, if it differs from `entered`."""
    if table is None:
        return
    changed = []
    for row in rows:
        if row.binding is not None and (value := value_of(row.binding)) != entered[row.row]:
            entered[row.row] = value
            changed.append(row.row)
    if changed:
        table[index_on(table.device, changed)] = index_on(table.device, [entered[row] for row in changed], table.dtype)
