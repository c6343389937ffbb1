"""Inputs of a step: from one packed upload to the fixed addresses of captured graphs.

`_unpack` runs before the step: it writes new values into the per-row tables, advances their counts, widens and pads data by
batch index, and looks up ids that an earlier step sampled. `_place` is the step's own first kernel: positions and slots of
its tokens, from counts and block tables whose exact values are on the device only. They are two kernels because no program
may read a table that another one writes. `_place_behind` does the same for a round of draft tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.inputs.reference import Behind, StepTensors

_LANES = 256  # entries of any kind that a program handles


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_updates", "padded_tokens", "padded_rows", "table_width"],
)
def _unpack(
    packed_ptr, input_ids_ptr, rows_ptr, seq_lens_ptr, sample_rows_ptr, query_start_loc_ptr, sample_positions_ptr,
    logit_tokens_ptr, last_ids_ptr, num_computed_ptr, block_tables_ptr, num_tokens, num_rows, num_updates,
    padded_tokens, padded_rows, table_width, LANES: tl.constexpr,
):  # fmt: skip
    # packed, int32: ids of num_tokens; rows, starts in the step, counts (-1: the table's) and sample flags of num_rows; then
    # table, index, value of num_updates. An id below zero is entry -1 - id of last_ids.
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    token = at < num_tokens
    raw = tl.load(packed_ptr + at, mask=token, other=0)
    late = token & (raw < 0)
    known = tl.where(raw < 0, 0, raw).to(tl.int64)
    ids = tl.where(late, tl.load(last_ids_ptr + tl.where(late, -1 - raw, 0), mask=late, other=0), known)
    tl.store(input_ids_ptr + at, ids, mask=at < padded_tokens)

    by_row_ptr = packed_ptr + num_tokens
    there = at < num_rows
    row = tl.load(by_row_ptr + at, mask=there, other=-1)
    start = tl.load(by_row_ptr + num_rows + at, mask=there, other=0)
    start = tl.where(there, start, num_tokens)
    following = tl.load(by_row_ptr + num_rows + at + 1, mask=at + 1 < num_rows, other=0)
    following = tl.where(at + 1 < num_rows, following, num_tokens)
    bound = tl.load(by_row_ptr + 2 * num_rows + at, mask=there, other=0)
    computed = tl.load(num_computed_ptr + row, mask=there & (bound < 0), other=0)
    seq_len = tl.where(there, tl.where(bound < 0, computed, bound) + following - start, 0)
    samples = tl.load(by_row_ptr + 3 * num_rows + at, mask=there, other=0)
    wanted = at < padded_rows
    tl.store(rows_ptr + at, row, mask=wanted)
    tl.store(seq_lens_ptr + at, seq_len, mask=wanted)
    tl.store(num_computed_ptr + row, seq_len, mask=there)
    tl.store(sample_rows_ptr + at, tl.where(samples != 0, row, -1), mask=wanted)
    tl.store(sample_positions_ptr + at, seq_len.to(tl.int64), mask=wanted)
    tl.store(logit_tokens_ptr + at, tl.where(following > 0, following - 1, 0).to(tl.int64), mask=wanted)
    tl.store(query_start_loc_ptr + at, start, mask=at <= padded_rows)

    updates_ptr = by_row_ptr + 4 * num_rows
    update = at < num_updates
    table = tl.load(updates_ptr + at, mask=update, other=0).to(tl.int64)
    index = tl.load(updates_ptr + num_updates + at, mask=update, other=0)
    value = tl.load(updates_ptr + 2 * num_updates + at, mask=update, other=0)
    tl.store(block_tables_ptr + table * table_width + index, value, mask=update)


def unpack(
    packed: Tensor, to: StepTensors, *, num_tokens: int, num_rows: int, num_updates: int, padded_tokens: int,
    padded_rows: int,
) -> None:  # fmt: skip
    """Unpack packed [num_tokens + 4 * num_rows + 3 * num_updates] int32 or longer; see the kernel for its order.

    Entries from a number to its padded number become padding: token id 0, batch indices without row or tokens. An update in
    the packed order is (table, index, value): block_tables.flatten(0, 1)[table, index] = value."""
    most = max(padded_tokens, padded_rows + 1, num_updates)
    _unpack[(triton.cdiv(most, _LANES),)](
        packed, to.input_ids, to.rows, to.seq_lens, to.sample_rows, to.query_start_loc, to.sample_positions,
        to.logit_tokens, to.last_ids, to.num_computed, to.block_tables, num_tokens, num_rows, num_updates,
        padded_tokens, padded_rows, to.block_tables.shape[2], LANES=_LANES, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["padded_tokens", "padded_rows", "halvings", "max_rows", "table_width", "max_tokens"])
def _place(
    positions_ptr, slot_mapping_ptr, rows_ptr, seq_lens_ptr, query_start_loc_ptr, block_tables_ptr, padded_tokens,
    padded_rows, halvings, max_rows, table_width, max_tokens, TABLES: tl.constexpr, STATE_TABLES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, UNIFORM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    # block_tables [TABLES, max_rows, table_width], slot_mapping [TABLES, max_tokens].
    token = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = token < tl.load(query_start_loc_ptr + padded_rows)
    if UNIFORM:
        index = token
    else:  # the last batch index that starts at or before the token
        low = tl.zeros_like(token)
        high = low + padded_rows
        for _ in range(halvings):
            middle = (low + high) // 2
            searching = low < high
            starts = tl.load(query_start_loc_ptr + middle, mask=searching, other=0) <= token
            low = tl.where(searching & starts, middle + 1, low)
            high = tl.where(searching & ~starts, middle, high)
        index = tl.maximum(low - 1, 0)
    following = tl.load(query_start_loc_ptr + index + 1, mask=inside, other=0)
    position = tl.load(seq_lens_ptr + index, mask=inside, other=0) - following + token
    position = tl.where(inside, position, 0)
    row = tl.load(rows_ptr + index, mask=inside, other=0)
    tl.store(positions_ptr + token, position.to(tl.int64), mask=token < padded_tokens)
    entry_ptr = block_tables_ptr + row.to(tl.int64) * table_width + position // BLOCK_SIZE
    table_size = max_rows.to(tl.int64) * table_width
    for table in tl.static_range(TABLES - STATE_TABLES):
        block = tl.load(entry_ptr + table * table_size, mask=inside, other=0).to(tl.int64)
        slot = tl.where(inside, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slot_mapping_ptr + table * max_tokens + token, slot, mask=token < padded_tokens)
    if STATE_TABLES > 0:  # by batch index, counted by the lanes here
        row = tl.load(rows_ptr + token, mask=token < padded_rows, other=-1)
        state_ptr = block_tables_ptr + row.to(tl.int64) * table_width
        for table in tl.static_range(TABLES - STATE_TABLES, TABLES):
            state = tl.load(state_ptr + table * table_size, mask=row >= 0, other=-1).to(tl.int64)
            tl.store(slot_mapping_ptr + table * max_tokens + token, state, mask=token < padded_rows)


def place_tokens(to: StepTensors, *, padded_tokens: int, padded_rows: int, uniform: bool) -> None:
    """Compute positions and slots; for captured graphs, which read the unpadded numbers of tokens and rows from tensors.
    Launched without overlap: later kernels may read positions and slots before they wait for their predecessor."""
    num_tables, max_rows, width = to.block_tables.shape
    _place[(triton.cdiv(max(padded_tokens, padded_rows), _LANES),)](
        to.positions, to.slot_mapping, to.rows, to.seq_lens, to.query_start_loc, to.block_tables, padded_tokens,
        padded_rows, padded_rows.bit_length(), max_rows, width, to.slot_mapping.shape[1], TABLES=num_tables,
        STATE_TABLES=to.num_state_tables, BLOCK_SIZE=to.block_size, UNIFORM=uniform, LANES=_LANES, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "max_rows", "table_width"])
def _place_behind(
    rows_ptr, offset_ptr, num_computed_ptr, block_tables_ptr, positions_ptr, slot_mapping_ptr, table_rows_ptr, seq_lens_ptr,
    query_start_loc_ptr, num_rows, max_rows, table_width, TABLES: tl.constexpr, BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    # One program: there are few rows, and each needs their total number.
    lane = tl.arange(0, LANES)
    count = 0
    for first in range(0, num_rows, LANES):
        row = tl.load(rows_ptr + first + lane, mask=first + lane < num_rows, other=-1)
        count += tl.sum((row >= 0).to(tl.int32))
    offset = tl.load(offset_ptr)
    table_size = max_rows.to(tl.int64) * table_width
    for first in range(0, num_rows + 1, LANES):
        index = first + lane
        inside = index < num_rows
        row = tl.load(rows_ptr + index, mask=inside, other=-1)
        is_row = row >= 0
        position = tl.load(num_computed_ptr + row, mask=is_row, other=0).to(tl.int64) + offset
        position = tl.where(is_row, position, 0)
        tl.store(positions_ptr + index, position, mask=inside)
        tl.store(table_rows_ptr + index, row.to(tl.int32), mask=inside)
        tl.store(seq_lens_ptr + index, tl.where(is_row, position + 1, 0).to(tl.int32), mask=inside)
        tl.store(query_start_loc_ptr + index, tl.minimum(index, count), mask=index <= num_rows)
        entry_ptr = block_tables_ptr + row * table_width + position // BLOCK_SIZE
        for table in tl.static_range(TABLES):
            block = tl.load(entry_ptr + table * table_size, mask=is_row, other=0).to(tl.int64)
            slot = tl.where(is_row, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(slot_mapping_ptr + table * num_rows + index, slot, mask=inside)


def place_behind(to: StepTensors, rows: Tensor, offset: Tensor) -> Behind:
    num_tables, max_rows, width = to.block_tables.shape
    num_rows = len(rows)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=rows.device)

    placed = Behind(
        empty(torch.int64, num_rows), empty(torch.int64, num_tables, num_rows), empty(torch.int32, num_rows),
        empty(torch.int32, num_rows), empty(torch.int32, num_rows + 1),
    )  # fmt: skip
    _place_behind[(1,)](
        rows, offset, to.num_computed, to.block_tables, *placed, num_rows, max_rows, width, TABLES=num_tables,
        BLOCK_SIZE=to.block_size, LANES=_LANES, num_warps=4,
    )  # fmt: skip
    return placed
