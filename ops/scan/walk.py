"""Loop of reference implementations over the requests of a step: requests of one token together, longer ones one by one.

A request that begins its sequence starts from zeros, never from its entry of the states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ops.attention.meta import AttentionMeta


def walk(
    states: Tensor, state_indices: Tensor, meta: AttentionMeta,
    single: Callable[[Tensor, Tensor], Tensor], span: Callable[[slice, Tensor], Tensor],
) -> None:  # fmt: skip
    """Advance states [num_states, ...] at state_indices [R] int64 (-1: none) in place by what the requests of the step bring.

    `single`: tokens [n] int64 and the n states before them -> those behind them. `span`: the tokens of one request and the state
    before them -> the one behind them. It reads the step on the host."""
    starts, seq_lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    ones: list[tuple[int, int, bool]] = []
    for request, state_index in enumerate(state_indices.tolist()):
        start, end = starts[request], starts[request + 1]
        if state_index < 0 or start == end:
            continue
        begins = seq_lens[request] == end - start
        if end - start == 1:
            ones.append((start, state_index, begins))
            continue
        before = torch.zeros_like(states[state_index]) if begins else states[state_index]
        states[state_index] = span(slice(start, end), before)
    if ones:
        tokens, at, begins_here = (torch.tensor(column, device=states.device) for column in zip(*ones, strict=True))
        before = states[at]
        before[begins_here] = 0
        states[at] = single(tokens, before)
