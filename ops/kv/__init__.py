"""Writes of keys and values to the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from ops import backends
from ops.kv import reference
from ops.kv.eight_bits import FP8, UNSCALED
from ops.native import module as native
from ops.registry import USUAL_ATTENTION, Op


def _natively(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: tuple[float, float]
) -> None:
    """Store keys and values. `kv_scales` belong to fp8 caches, which this kernel does not write."""
    native.store_kv(k, v, k_cache, v_cache, slot_mapping)


_store_kv = Op(
    "store_kv",
    USUAL_ATTENTION,
    [backends.native("store_kv", _natively), backends.reference("store_kv", reference.store_kv)],
)


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    kv_scales: tuple[float, float] = UNSCALED,
) -> None:  # fmt: skip
    """Write k, v [T, Hkv, D] into k_cache, v_cache [num_blocks, Hkv, block_size, D] at slot_mapping [T] int64.

    slot = block_id * block_size + offset; -1 writes nothing. An entry of an int8 cache has four more bytes, its float32 scale
    (ops/kv/eight_bits.py). `kv_scales`: factors of the numbers in fp8 caches, for keys and values; ignored for other caches."""
    _store_kv.runs[k.device, k.dtype, k_cache.dtype, k.shape[2]](k, v, k_cache, v_cache, slot_mapping, kv_scales)


def read_scales(cache: Tensor, kv_scales: tuple[float, float]) -> tuple[float, float]:
    """Return the factors of scores against the cache's keys, and of sums of its values."""
    return kv_scales if cache.dtype == FP8 else UNSCALED
