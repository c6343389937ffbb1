"""GPTQ (Frantar et al. 2022): rounds columns one by one. The error of a column is compensated in the remaining columns, based on
the correlation of the layer's inputs.

Scales are chosen first (static groups). Columns can therefore be rounded in any order, here those with the largest inputs first,
and are stored in their original order."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.quantize.schemes import RoundingScheme, spread

_BLOCK = 128  # columns whose errors are applied to the rest of the matrix together
_DAMPING = 0.01  # share of the diagonal's mean that is added to the diagonal


def gptq(scheme: RoundingScheme, weight: Tensor, gram: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (codes [N, K], scales) of weight [N, K] float32. gram [K, K] float32: sum of x^T x over inputs x. `dtype`: dtype of
    scales."""
    importance = gram.diagonal().clone()
    scales = scheme.scales(weight, importance.clamp(min=float(importance.mean()) * 1e-4), dtype)
    order = importance.argsort(descending=True)
    by_column = spread(scales, weight.shape[1])[:, order]
    left = weight[:, order].clone()
    factor = _factor(gram[order][:, order])
    codes = torch.empty_like(left)
    for begin in range(0, left.shape[1], _BLOCK):
        end = min(begin + _BLOCK, left.shape[1])
        block, own = left[:, begin:end], factor[begin:end, begin:end]
        errors = torch.empty_like(block)
        for column in range(end - begin):
            scale = by_column[:, begin + column]
            rounded = scheme.codes(block[:, column] / scale)
            codes[:, begin + column] = rounded
            error = (block[:, column] - rounded * scale) / own[column, column]
            block[:, column:] -= error[:, None] * own[column, column:]
            errors[:, column] = error
        left[:, end:] -= errors @ factor[begin:end, end:]
    placed = torch.empty_like(codes)
    placed[:, order] = codes
    return placed, scales


def _factor(gram: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of `gram`. `gram` is damped until the factor exists."""
    damping = float(gram.diagonal().mean()) * _DAMPING or 1.0  # if all inputs were zero
    identity = torch.eye(len(gram), dtype=torch.float64)
    wide = gram.double()
    for _ in range(8):
        lower, failed = torch.linalg.cholesky_ex(wide + damping * identity)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                made: Tensor = upper.float()
                return made
        damping *= 10
    raise ValueError("the inputs of a layer contain NaN or infinity")
