"""Attention within a step by torch's fused kernel: no score matrix in memory. Neighbouring rows of one length are one call, so
texts of equal length cost no more than a padded batch, and others are not padded.

Knows full masks, their windows and relative biases; the rest is the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta


def computes(heads: AttentionHeads) -> bool:
    """Whether `packed_attention` knows all that these heads do."""
    return heads.softcap is None and heads.sinks is None and heads.alibi is None


def packed_attention(q: Tensor, k: Tensor, v: Tensor, meta: AttentionMeta, heads: AttentionHeads) -> Tensor:
    """q [T, Hq, D], k and v [T, Hkv, D], all that a row has -> [T, Hq, D]. Under a full mask."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grouped = heads.num_heads != heads.num_kv_heads
    for start, count, length in _runs(meta.query_start_loc.tolist()):
        tokens = slice(start, start + count * length)
        queries, keys, values = (
            each[tokens].view(count, length, -1, heads.head_size).transpose(1, 2) for each in (q, k, v)
        )
        mixed = scaled_dot_product_attention(
            queries, keys, values, attn_mask=_mask(heads, length, q), scale=heads.scale, enable_gqa=grouped
        )
        out[tokens] = mixed.transpose(1, 2).flatten(0, 1)
    return out


def _runs(starts: list[int]) -> Iterator[tuple[int, int, int]]:
    """The first token of each run of rows of one length, how many they are, and that length."""
    for length, rows in groupby(pairwise(starts), key=lambda row: row[1] - row[0]):
        first, *others = rows
        if length:
            yield first[0], 1 + len(others), length


def _mask(heads: AttentionHeads, length: int, like: Tensor) -> Tensor | None:
    """What scores of a row gain, None for nothing."""
    bias = heads.relative_bias
    if bias is None and (heads.window is None or heads.window >= length):
        return None
    positions = torch.arange(length, device=like.device)
    behind = positions - positions[:, None]
    mask = like.new_zeros(length, length) if bias is None else bias[:, behind + bias.shape[1] // 2].to(like.dtype)
    return mask if heads.window is None else mask.masked_fill(behind.abs() >= heads.window, float("-inf"))
