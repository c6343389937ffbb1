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


def decays(decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """decay [..., n], logarithms of each token's factor -> between [..., n, n], the product of the factors behind token j up to
    i, 0 above the diagonal; until [..., n], up to each; left [..., n], behind each. In the dtype of decay.

    Sums are float64: a difference of two sums is small where both are large, and their rounding would be the error of its
    exponential (sums of 100 in float32: 4e-6 of each factor)."""
    sums = decay.double().cumsum(-1)
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(decay.dtype).tril().exp().tril()
    left = (sums[..., -1:] - sums).to(decay.dtype).exp()
    return between, sums.to(decay.dtype).exp(), left
