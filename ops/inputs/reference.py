"""Inputs of a step from its upload, in plain torch; see triton_unpack.py for the packed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of model and sampler for up to T tokens of up to B rows, and the per-row tables of R rows that persist between steps.

    input_ids, positions [T] int64. slot_mapping [G, T] int64, for G block tables of each row: by token, or, in the last
    `num_state_tables`, by batch index. By batch index: rows, seq_lens, sample_rows [B] int32; query_start_loc [B + 1] int32;
    sample_positions, logit_tokens [B] int64, the latter each row's last token of the step. By row: last_ids [R + R * D + 1] int64,
    the last sampled id of each row, then D draft ids for each row; num_computed [R] int32, tokens in the KV cache after the steps
    so far; block_tables [G, R, E] int32, with `block_size` tokens per entry."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    rows: Tensor
    seq_lens: Tensor
    sample_rows: Tensor
    query_start_loc: Tensor
    sample_positions: Tensor
    logit_tokens: Tensor
    last_ids: Tensor
    num_computed: Tensor
    block_tables: Tensor
    num_state_tables: int
    block_size: int


class Behind(NamedTuple):
    """Inputs of one further token for each of B rows. positions [B] int64; slot_mapping [G, B] int64; rows, seq_lens [B] int32;
    query_start_loc [B + 1] int32."""

    positions: Tensor
    slot_mapping: Tensor
    rows: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor


def unpack(
    packed: Tensor, to: StepTensors, *, num_tokens: int, num_rows: int, num_updates: int, padded_tokens: int,
    padded_rows: int,
) -> None:  # fmt: skip
    sizes = [num_tokens] + [num_rows] * 4 + [num_updates] * 3
    ids, rows, starts, bound, samples, tables, indices, values = packed[: sum(sizes)].long().split(sizes)
    to.block_tables.flatten(0, 1)[tables, indices] = values.int()
    ids = torch.where(ids < 0, to.last_ids[(-1 - ids).clamp(min=0)], ids)
    query_start_loc = pad(starts, (0, padded_rows + 1 - num_rows), value=num_tokens)
    seq_lens = torch.where(bound < 0, to.num_computed[rows], bound) + query_start_loc[: num_rows + 1].diff()
    to.num_computed[rows] = seq_lens.int()
    to.query_start_loc[: padded_rows + 1] = query_start_loc.int()
    to.logit_tokens[:padded_rows] = (query_start_loc[1:] - 1).clamp(min=0)
    to.input_ids[:padded_tokens] = pad(ids, (0, padded_tokens - num_tokens))
    sample_rows = torch.where(samples != 0, rows, -1)
    for target, known, padding in (
        (to.rows, rows, -1), (to.seq_lens, seq_lens, 0), (to.sample_rows, sample_rows, -1),
        (to.sample_positions, seq_lens, 0),
    ):  # fmt: skip
        target[:padded_rows] = pad(known, (0, padded_rows - num_rows), value=padding)


def place_tokens(to: StepTensors, *, padded_tokens: int, padded_rows: int, uniform: bool) -> None:
    tokens = torch.arange(padded_tokens, device=to.rows.device)
    starts = to.query_start_loc[: padded_rows + 1].long()
    inside = tokens < starts[-1]
    index = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(max=padded_rows - 1)
    positions = torch.where(inside, to.seq_lens[index] - starts[index + 1] + tokens, 0)
    to.positions[:padded_tokens] = positions
    rows = to.rows[:padded_rows].long()
    token_rows = rows[index].clamp(min=0)
    first_state = len(to.slot_mapping) - to.num_state_tables
    for table, mapping in zip(to.block_tables[:first_state], to.slot_mapping, strict=False):
        blocks = table[token_rows, positions // to.block_size].long()
        mapping[:padded_tokens] = torch.where(inside, blocks * to.block_size + positions % to.block_size, -1)
    for table, mapping in zip(to.block_tables[first_state:], to.slot_mapping[first_state:], strict=True):
        mapping[:padded_rows] = torch.where(rows >= 0, table[rows.clamp(min=0), 0].long(), -1)


def place_behind(to: StepTensors, rows: Tensor, offset: Tensor) -> Behind:
    is_row, known = rows >= 0, rows.clamp(min=0)
    positions = torch.where(is_row, to.num_computed[known] + offset, 0)
    blocks = to.block_tables[:, known, positions // to.block_size].long()
    slots = torch.where(is_row, blocks * to.block_size + positions % to.block_size, -1)
    seq_lens = torch.where(is_row, positions + 1, 0).int()
    return Behind(positions, slots, rows.int(), seq_lens, pad(is_row.cumsum(0), (1, 0)).int())
