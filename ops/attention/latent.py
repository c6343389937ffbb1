"""LatentHeads: multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form, apart from the step's data.

What the cache holds for a token is one vector, which all heads share: a latent of `rank` dims, then a key that is rotated by its
position. A head's query has been brought into the same space, and what it mixes are the latents; so there is one kv head
whose values are the first dims of its keys, stored once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """cos_sin [max_pos, P] float32 rotates the last P dims, neighbours 2i and 2i + 1 together; D = rank + P. `scale` multiplies
    the scores. `kv_scale`: what numbers of an fp8 cache are times (ops/kv/fp8_numbers.py)."""

    num_heads: int
    rank: int
    scale: float
    cos_sin: Tensor
    kv_scale: float = 1.0

    @property
    def head_size(self) -> int:
        return self.rank + self.cos_sin.shape[1]
