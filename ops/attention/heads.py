"""AttentionHeads: what one attention layer does between its qkv projection and its mixing, apart from the step's data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ops.attention.mask import CAUSAL
from ops.kv.fp8_numbers import UNSCALED


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """qkv rows hold `num_heads` query heads, then `num_kv_heads` key heads, then as many value heads, each `head_size` wide.

    `norms`: weights [head_size] of the RMS norms of each q and k head, with `norm_eps`; None for no norm.
    cos_sin [max_pos, D_rot] float32: D_rot / 2 cosines, then as many sines; D_rot 0 rotates nothing. `scale` multiplies q k^T;
    `window`, `softcap`, `sinks`, `alibi` and `mask` as for `ops.paged_attention`. `relative_bias` [Hq, 2 * R - 1] float32, for
    `ops.attend_packed` alone: the score of a key that stands d behind its query, d > -R and < R, gains entry R - 1 + d. `kv_scales`
    as for `ops.store_kv`."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    cos_sin: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    norm_eps: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    mask: str = CAUSAL
    relative_bias: Tensor | None = None
    kv_scales: tuple[float, float] = UNSCALED

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, *] -> views q [T, Hq, D], k and v [T, Hkv, D]."""
        heads = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_size)
        q, k, v = heads.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q, k, v
