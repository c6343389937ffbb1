"""Writing keys and values into the paged cache, in plain torch."""

from __future__ import annotations

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    written = slots >= 0
    slots = slots[written]
    blocks, offsets = slots // k_cache.shape[2], slots % k_cache.shape[2]
    k_cache[blocks, :, offsets] = k[written].to(k_cache.dtype)
    v_cache[blocks, :, offsets] = v[written].to(v_cache.dtype)
