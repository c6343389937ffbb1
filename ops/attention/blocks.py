"""Attention in which blocks of a step's tokens see each other whole, as a picture's do (Gemma 3, 2025): causal attention by
whatever computes it, and then that of each block anew, by its book. What a block sees must be stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.attention.reference import QUERY_CHUNK, attend_hidden, gather


class TokenBlock(NamedTuple):
    """Tokens [start, stop) of a step, of a request whose context is in table number `table`, the first of them at `position`.
    `in_window`: they see no more than a layer's window lets them."""

    table: int
    start: int
    stop: int
    position: int
    in_window: bool = True


def mix_blocks(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, heads: AttentionHeads, blocks: Sequence[TokenBlock],
    out: Tensor,
) -> None:  # fmt: skip
    """Overwrite what `out` [T, Hq, D] has for tokens of `blocks`: each sees all before its block's end, or what a window lets it of
    that. q [T, Hq, D], rotated; keys and values are stored."""
    for table, start, stop, position, in_window in blocks:
        window = heads.window if in_window else None
        end = position + stop - start
        keys, values = (gather(cache, meta.block_tables[table], end) for cache in (k_cache, v_cache))
        for first in range(start, stop, QUERY_CHUNK):
            last = min(first + QUERY_CHUNK, stop)
            at = position + first - start
            low = 0 if window is None else max(0, at + 1 - window)
            positions = torch.arange(at, at + last - first, device=q.device)[:, None]
            key_positions = torch.arange(low, end, device=q.device)
            hidden = torch.zeros((last - first, end - low), dtype=torch.bool, device=q.device)
            if window is not None:
                hidden = key_positions <= positions - window
            out[first:last] = attend_hidden(
                q[first:last], keys[:, low:], values[:, low:], hidden, heads.scale, heads.softcap, heads.sinks, None
            )
