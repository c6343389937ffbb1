"""What a step needs, from one packed upload to the fixed addresses that captured graphs read: widened, padded, completed.

One program per 256 entries of any kind; what is late (an id that an earlier step sampled) is looked up on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ops.inputs.tensors import StepTensors

_LANES = 256


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_lines",
        "num_updates",
        "padded_tokens",
        "padded_lines",
        "table_width",
        "most_tokens",
    ]
)
def _unpack(
    packed_ptr, ids_ptr, positions_ptr, slots_ptr, rows_ptr, context_lens_ptr, sample_rows_ptr, query_starts_ptr,
    sample_positions_ptr, last_tokens_ptr, last_ids_ptr, block_tables_ptr, num_tokens, num_lines, num_updates,
    padded_tokens, padded_lines, table_width, most_tokens, TABLES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    # packed, int32: ids, positions and, for each of TABLES, slots of num_tokens; rows, starts, context lengths, sample flags
    # of num_lines; then table, index, value of num_updates. An id below zero is what row -1 - id sampled last.
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    token = at < num_tokens
    raw = tl.load(packed_ptr + at, mask=token, other=0)
    late = token & (raw < 0)
    known = tl.where(raw < 0, 0, raw).to(tl.int64)
    ids = tl.where(late, tl.load(last_ids_ptr + tl.where(late, -1 - raw, 0), mask=late, other=0), known)
    positions = tl.load(packed_ptr + num_tokens + at, mask=token, other=0)
    wanted = at < padded_tokens
    tl.store(ids_ptr + at, ids, mask=wanted)
    tl.store(positions_ptr + at, positions.to(tl.int64), mask=wanted)
    for table in tl.static_range(TABLES):
        slots = tl.load(packed_ptr + (2 + table) * num_tokens + at, mask=token, other=-1)
        tl.store(slots_ptr + table * most_tokens + at, slots.to(tl.int64), mask=wanted)

    lines_ptr = packed_ptr + (2 + TABLES) * num_tokens
    line = at < num_lines
    row = tl.load(lines_ptr + at, mask=line, other=-1)
    start = tl.load(lines_ptr + num_lines + at, mask=line, other=0)
    start = tl.where(line, start, num_tokens)
    following = tl.load(lines_ptr + num_lines + at + 1, mask=at + 1 < num_lines, other=0)
    following = tl.where(at + 1 < num_lines, following, num_tokens)
    context = tl.load(lines_ptr + 2 * num_lines + at, mask=line, other=0)
    samples = tl.load(lines_ptr + 3 * num_lines + at, mask=line, other=0)
    wanted = at < padded_lines
    tl.store(rows_ptr + at, row, mask=wanted)
    tl.store(context_lens_ptr + at, context, mask=wanted)
    tl.store(sample_rows_ptr + at, tl.where(samples != 0, row, -1), mask=wanted)
    tl.store(sample_positions_ptr + at, context.to(tl.int64), mask=wanted)
    tl.store(last_tokens_ptr + at, tl.where(following > 0, following - 1, 0).to(tl.int64), mask=wanted)
    tl.store(query_starts_ptr + at, start, mask=at <= padded_lines)

    updates_ptr = lines_ptr + 4 * num_lines
    update = at < num_updates
    table = tl.load(updates_ptr + at, mask=update, other=0).to(tl.int64)
    index = tl.load(updates_ptr + num_updates + at, mask=update, other=0)
    value = tl.load(updates_ptr + 2 * num_updates + at, mask=update, other=0)
    tl.store(block_tables_ptr + table * table_width + index, value, mask=update)


def unpack(
    packed: Tensor, to: StepTensors, *, num_tokens: int, num_lines: int, num_updates: int, padded_tokens: int,
    padded_lines: int,
) -> None:  # fmt: skip
    """packed [(2 + G) * num_tokens + 4 * num_lines + 3 * num_updates] int32 and more; see the kernel for its order.

    What lies between a number and its padded one becomes padding: token id 0 without a slot, lines without row or tokens.
    An update's row of the packed order is (table, index, value): block_tables.flatten(0, 1)[table, index] = value."""
    most = max(padded_tokens, padded_lines + 1, num_updates)
    _unpack[(triton.cdiv(most, _LANES),)](
        packed, to.ids, to.positions, to.slots, to.rows, to.context_lens, to.sample_rows, to.query_starts,
        to.sample_positions, to.last_tokens, to.last_ids, to.block_tables, num_tokens, num_lines, num_updates,
        padded_tokens, padded_lines, to.block_tables.shape[2], to.slots.shape[1], TABLES=len(to.slots), LANES=_LANES,
        num_warps=4,
    )  # fmt: skip
