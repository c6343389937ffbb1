"""DeltaHeads: what a gated delta rule works with, whatever the step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Value head h reads with query and key head h // (num_value_heads // num_key_heads).

    a (below 0) and dt_bias [num_value_heads] float32: how fast a head forgets, and what is added to its dt."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    a: Tensor
    dt_bias: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of q, k and v of a token, all heads."""
        keys = self.num_key_heads * self.key_size
        return keys, keys, self.num_value_heads * self.value_size
