"""Memory kinds, in few words."""

from __future__ import annotations

from runtime.kv.kinds import FLOAT32, AttentionKVSpec, Chunk, Full, KVDtype, RecurrentStateSpec, State, Window

BFLOAT16 = KVDtype("bfloat16", 2)
INT8 = KVDtype("int8", 1, scale_bytes=4)


def kv(num_kv_heads: int = 1, head_size: int = 8, dtype: KVDtype | None = FLOAT32, *, latent=False) -> AttentionKVSpec:
    return AttentionKVSpec(num_kv_heads, head_size, latent, dtype)


def full(num_kv_heads: int, head_size: int, dtype: KVDtype | None = FLOAT32, *, latent=False) -> Full:
    return Full(kv(num_kv_heads, head_size, dtype, latent=latent))


def window(num_kv_heads: int, head_size: int, size: int, dtype: KVDtype | None = FLOAT32) -> Window:
    return Window(kv(num_kv_heads, head_size, dtype), size)


def chunk(num_kv_heads: int, head_size: int, size: int, dtype: KVDtype | None = FLOAT32) -> Chunk:
    return Chunk(kv(num_kv_heads, head_size, dtype), size)


def state(*shapes: tuple[int, ...]) -> State:
    return State(RecurrentStateSpec(shapes))
