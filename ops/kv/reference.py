"""Writes of keys and values to the paged cache, in plain torch; for 8-bit caches see eight_bits.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kv.eight_bits import FP8, UNSCALED, to_fp8, to_int8_entries


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    kv_scales: tuple[float, float] = UNSCALED,
) -> None:  # fmt: skip
    written = slot_mapping >= 0
    slot_mapping = slot_mapping[written]
    blocks, offsets = slot_mapping // k_cache.shape[2], slot_mapping % k_cache.shape[2]
    for x, cache, scale in zip((k[written], v[written]), (k_cache, v_cache), kv_scales, strict=True):
        cache[blocks, :, offsets] = _entries(x, cache.dtype, scale)


def _entries(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype == torch.int8:
        return to_int8_entries(x)
    return to_fp8(x, scale) if dtype == FP8 else x.to(dtype)
