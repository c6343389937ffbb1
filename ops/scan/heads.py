"""ScanHeads: what a state space layer of Mamba-2's kind scans with, whatever the step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScanHeads:
    """Heads of a selective scan: `num_heads` heads of `head_size` dims share `num_groups` pairs of input and output vectors B,
    C of `state_size` dims; head h uses group h // (num_heads // num_groups).

    a (below 0), d and dt_bias [num_heads] float32: decay, skip connection, and offset of dt."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    a: Tensor
    d: Tensor
    dt_bias: Tensor

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_size
