"""AttentionHeads: settings and weights of one layer's attention, independent of the step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ops.kv.eight_bits import UNSCALED
from ops.registry import ShapeClass

# Attention masks: keys that a query attends to, apart from windows. Values of `AttentionHeads.mask`. "causal": keys at
# its own position and before. "full": all of its row, or with a window those less than the window away on either side.
# "prefix_full": causal, and additionally tokens of a prefix of `AttentionMeta.prefix_lens` tokens attend to each
# other (prefix language models, Raffel et al. 2020). Later keys that a query attends to must be in its own step: the
# whole row with "full", the prefix with "prefix_full".
CAUSAL, FULL, PREFIX_FULL = "causal", "full", "prefix_full"
MASKS = (CAUSAL, FULL, PREFIX_FULL)


def causal_only(case: ShapeClass) -> str | None:
    """Return a refusal if the mask is not causal: the `supports` of kernels for causal masks only."""
    return None if case.mask == CAUSAL else "computes causal attention only"


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Heads of an attention layer. A row of qkv has `num_heads` query heads, then `num_kv_heads` key heads, then as many value
    heads.

    `norms`: weights [head_size] of the RMS norms of q heads and k heads, with `norm_eps`; None for no norm. cos_sin [max_pos,
    D_rot] float32: D_rot / 2 cosines, then as many sines; with D_rot 0 nothing is rotated. `scale` multiplies q k^T. `window`,
    `softcap`, `sinks`, `alibi`, `mask`: see `ops.paged_attention`. `relative_bias` [Hq, 2 * R - 1] float32, for
    `ops.attend_packed` only: entry R - 1 + d is added to the score of a key d positions after its query (-R < d < R).
    `kv_scales`: see `ops.store_kv`."""

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
        """Return views of qkv [T, *]: q [T, Hq, D], k and v [T, Hkv, D]."""
        heads = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_size)
        q, k, v = heads.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q, k, v


# LatentHeads: multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form, independent of the step. The cache
# has one vector per token, shared by all heads: a latent of `rank` dims, then a key that is rotated by its position.
# Each head's query is projected to the same space, and its values are the latents. So there is one kv head whose
# values are the first dims of its keys, stored once.
@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Heads of latent attention; the head size is D = rank + P. cos_sin [max_pos, P] float32 rotates the last P dims in pairs (2i,
    2i + 1). `scale` multiplies the scores. `kv_scale`: factor of the numbers in an fp8 cache (ops/kv/eight_bits.py)."""

    num_heads: int
    rank: int
    scale: float
    cos_sin: Tensor
    kv_scale: float = 1.0

    @property
    def head_size(self) -> int:
        return self.rank + self.cos_sin.shape[1]
