"""Recording of a layer's attention as one call of a traced stack."""

from __future__ import annotations

from typing import Any

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
    qkv.program.attend(
        qkv.register, out.register, _shape(heads), heads.cos_sin, *(heads.norms or (None, None)), heads.norm_eps, heads.sinks,
        k_cache, v_cache, slot_mapping.table,
    )  # fmt: skip
    return out


def attend_packed(qkv: Symbol, heads: AttentionHeads, positions: Tensor, meta: AttentionMeta) -> Symbol:
    if not isinstance(positions, Symbol):
        raise NotTraceable("attention to what is not of the step")
    if heads.alibi is not None or heads.relative_bias is not None:
        raise NotTraceable("attention with biases")
    out = Symbol.of(qkv.program, heads.num_heads * heads.head_size)
    norms = heads.norms or (None, None)
    qkv.program.attend_packed(
        qkv.register, out.register, _shape(heads), heads.cos_sin, *norms, heads.norm_eps, heads.sinks
    )
    return out


def _shape(heads: AttentionHeads) -> Any:
    return native.module.AttendShape(
        heads.num_heads, heads.num_kv_heads, heads.head_size, heads.scale, heads.window or 0, heads.softcap or 0.0
    )
