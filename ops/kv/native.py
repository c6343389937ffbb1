"""Writing keys and values into the paged cache by oneloop_native; bfloat16 and int8 round to nearest even."""

from __future__ import annotations

from torch import Tensor

from ops.native import module as native


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: tuple[float, float]
) -> None:
    """Store keys and values. `kv_scales` belong to fp8 caches, which this kernel does not write."""
    native.store_kv(k, v, k_cache, v_cache, slot_mapping)
