"""A layer's attention as one call of a compiled stack."""

from __future__ import annotations

from torch import Tensor

from ops import native
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.symbols import NotTraceable, Symbol


def attend(
    qkv: Symbol, heads: AttentionHeads, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    meta: AttentionMeta,
) -> Symbol:  # fmt: skip
    if not isinstance(positions, Symbol) or not isinstance(slot_mapping, Symbol) or slot_mapping.table is None:
        raise NotTraceable("attention to what is not of the step")
    if heads.alibi is not None:
        raise NotTraceable("attention with linear biases")
    out = Symbol.of(qkv.program, heads.num_heads * heads.head_size)
    shape = native.module.AttendShape(
        heads.num_heads, heads.num_kv_heads, heads.head_size, heads.scale, heads.window or 0, heads.softcap or 0.0
    )
    norms = heads.norms or (None, None)
    qkv.program.attend(
        qkv.register, out.register, shape, heads.cos_sin, *norms, heads.norm_eps, heads.sinks, k_cache, v_cache, slot_mapping.table
    )  # fmt: skip
    return out
