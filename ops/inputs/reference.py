"""Unpacking a step's upload in plain torch; see triton_unpack.py for the order of what is packed."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.inputs.tensors import StepTensors


def unpack(
    packed: Tensor, to: StepTensors, *, num_tokens: int, num_lines: int, num_updates: int, padded_tokens: int,
    padded_lines: int,
) -> None:  # fmt: skip
    num_tables = len(to.slots)
    sizes = [num_tokens] * 2 + [num_tables * num_tokens] + [num_lines] * 4 + [num_updates] * 3
    words = packed[: sum(sizes)].long().split(sizes)
    ids, positions, slots, rows, starts, contexts, samples, tables, indices, values = words
    to.block_tables.flatten(0, 1)[tables, indices] = values.int()
    ids = torch.where(ids < 0, to.last_ids[(-1 - ids).clamp(min=0)], ids)
    each_slots = zip(to.slots, slots.view(num_tables, -1), [-1] * num_tables, strict=True)
    for target, known, padding in ((to.ids, ids, 0), (to.positions, positions, 0), *each_slots):
        target[:padded_tokens] = padding
        target[:num_tokens] = known
    starts = torch.nn.functional.pad(starts, (0, padded_lines + 1 - num_lines), value=num_tokens)
    to.query_starts[: padded_lines + 1] = starts.int()
    to.last_tokens[:padded_lines] = (starts[1:] - 1).clamp(min=0)
    sample_rows = torch.where(samples != 0, rows, -1)
    for target, known, padding in (
        (to.rows, rows, -1), (to.context_lens, contexts, 0), (to.sample_rows, sample_rows, -1),
        (to.sample_positions, contexts, 0),
    ):  # fmt: skip
        target[:padded_lines] = padding
        target[:num_lines] = known
