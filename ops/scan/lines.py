"""Lines of a step on the host, and how references walk them: those of one token all at once, longer ones one by one.

Whatever is remembered of a sequence lies in a slot; a line that begins its sequence finds zeros, never what the slot holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ops.attention.meta import AttentionMeta


def walk(
    states: Tensor, slot_mapping: Tensor, meta: AttentionMeta,
    single: Callable[[Tensor, Tensor], Tensor], span: Callable[[slice, Tensor], Tensor],
) -> None:  # fmt: skip
    """Advance states [num_slots, ...] at slot_mapping [L] int64 (-1: none) in place by what the lines of the step bring.

    `single`: tokens [n] int64 and the n states before them -> those behind them. `span`: the tokens of one line and the state
    before them -> the one behind them. It reads the step on the host."""
    starts, seq_lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    ones: list[tuple[int, int, bool]] = []
    for line, slot in enumerate(slot_mapping.tolist()):
        start, end = starts[line], starts[line + 1]
        if slot < 0 or start == end:
            continue
        begins = seq_lens[line] == end - start
        if end - start == 1:
            ones.append((start, slot, begins))
            continue
        before = torch.zeros_like(states[slot]) if begins else states[slot]
        states[slot] = span(slice(start, end), before)
    if ones:
        tokens, at, begins_here = (torch.tensor(column, device=states.device) for column in zip(*ones, strict=True))
        before = states[at]
        before[begins_here] = 0
        states[at] = single(tokens, before)
