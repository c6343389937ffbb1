"""Writing keys and values into the paged cache, in plain torch; for an int8 cache see int8_entries.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kv.int8_entries import to_int8_entries


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    written = slot_mapping >= 0
    slot_mapping = slot_mapping[written]
    blocks, offsets = slot_mapping // k_cache.shape[2], slot_mapping % k_cache.shape[2]
    for x, cache in ((k[written], k_cache), (v[written], v_cache)):
        cache[blocks, :, offsets] = to_int8_entries(x) if cache.dtype == torch.int8 else x.to(cache.dtype)
