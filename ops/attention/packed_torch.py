"""Attention within a step by torch's fused kernel, without a score matrix in memory. Adjacent rows of equal length share a call, so
nothing is padded. If torch is limited to one thread, Python threads share the heads, because torch's own threads would spin on the
cores of the native kernels.

Supports full masks with windows and relative biases; the reference computes other cases."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ops import native
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta

_MAX_THREADS = 16
_WORTH_SHARING = 1 << 22  # multiplications: tenths of a millisecond; a thread wakes in hundredths


def computes(heads: AttentionHeads) -> bool:
    """Return whether `packed_attention` supports everything that these heads need."""
    return heads.softcap is None and heads.sinks is None and heads.alibi is None


def packed_attention(q: Tensor, k: Tensor, v: Tensor, meta: AttentionMeta, heads: AttentionHeads) -> Tensor:
    """Return attention [T, Hq, D] within each row under a full mask, for q [T, Hq, D], k and v [T, Hkv, D]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start, count, length in _runs(meta.query_start_loc.tolist()):
        tokens = slice(start, start + count * length)
        queries, keys, values, mixed = (
            each[tokens].view(count, length, -1, heads.head_size).transpose(1, 2) for each in (q, k, v, out)
        )
        run = _Run(queries, keys, values, mixed, _mask(heads, length, q), heads.scale)
        work = count * length * length * heads.num_heads * heads.head_size
        first, *others = _shares(heads, num_threads(q) if work >= _WORTH_SHARING else 1)
        waiting = [_threads().submit(run.mix, *share) for share in others]
        run.mix(*first)
        for each in waiting:
            each.result()
    return out


class _Run(NamedTuple):
    """Rows of equal length n: queries and out [R, Hq, n, D], keys and values [R, Hkv, n, D], and the additive mask."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    mask: Tensor | None
    scale: float

    @torch.inference_mode()
    def mix(self, ours: slice, theirs: slice) -> None:
        """Compute query heads `ours`, which read KV heads `theirs`."""
        mask = self.mask if self.mask is None or self.mask.dim() == 2 else self.mask[ours]
        grouped = self.queries.shape[1] != self.keys.shape[1]
        self.out[:, ours] = scaled_dot_product_attention(
            self.queries[:, ours], self.keys[:, theirs], self.values[:, theirs], attn_mask=mask, scale=self.scale,
            enable_gqa=grouped,
        )  # fmt: skip


def num_threads(x: Tensor) -> int:
    """Return how many threads may share a call: those of the native kernels if torch is limited to one thread, otherwise 1."""
    if x.device.type != "cpu" or native.module is None or torch.get_num_threads() != 1:
        return 1
    return int(native.module.num_threads())


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="oneloop-attention")


def _shares(heads: AttentionHeads, count: int) -> list[tuple[slice, slice]]:
    group, parts = heads.num_heads // heads.num_kv_heads, min(count, heads.num_kv_heads, _MAX_THREADS)
    ends = [heads.num_kv_heads * part // parts for part in range(parts + 1)]
    return [(slice(start * group, stop * group), slice(start, stop)) for start, stop in pairwise(ends)]


def _runs(starts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, number of rows, length) for each run of adjacent rows of equal length."""
    for length, rows in groupby(pairwise(starts), key=lambda row: row[1] - row[0]):
        first, *others = rows
        if length:
            yield first[0], 1 + len(others), length


def _mask(heads: AttentionHeads, length: int, like: Tensor) -> Tensor | None:
    bias = heads.relative_bias
    if bias is None and (heads.window is None or heads.window >= length):
        return None
    positions = torch.arange(length, device=like.device)
    behind = positions - positions[:, None]
    mask = like.new_zeros(length, length) if bias is None else bias[:, behind + bias.shape[1] // 2].to(like.dtype)
    return mask if heads.window is None else mask.masked_fill(behind.abs() >= heads.window, float("-inf"))
