"""Decays: what is left of a token's input when later tokens of a chunk read it, out of the logarithms of what each leaves."""

from __future__ import annotations

from torch import Tensor


def decays(decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """decay [..., n], logarithms of each token's factor -> between [..., n, n], the product of the factors behind token j up to
    i, 0 above the diagonal; until [..., n], up to each; left [..., n], behind each. In the dtype of decay.

    Sums are float64: a difference of two sums is small where both are large, and their rounding would be the error of its
    exponential (sums of 100 in float32: 4e-6 of each factor)."""
    sums = decay.double().cumsum(-1)
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(decay.dtype).tril().exp().tril()
    left = (sums[..., -1:] - sums).to(decay.dtype).exp()
    return between, sums.to(decay.dtype).exp(), left
