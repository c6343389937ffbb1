"""Rotary tables: cosines and sines of all positions, computed once in float32 by the formulas of transformers.

RoFormer (Su et al. 2021); linear scaling (kaiokendev 2023, Chen et al. 2023); YaRN (Peng et al. 2023); Llama 3.1 (Meta 2024);
LongRoPE (Ding et al. 2024). `ops.rope` applies the tables to q and k."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from runtime.models.forward_step import ForwardStep
from runtime.models.spec.rope import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)


def cos_sin_table(rope: Rope | None, num_positions: int) -> Tensor:
    """Return a table [num_positions, dim] float32: dim / 2 cosines, then dim / 2 sines. If `rope` is None, dim is 0."""
    if rope is None:
        return torch.empty((num_positions, 0), dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, num_positions)
    table = torch.empty((num_positions, rope.dim), dtype=torch.float32)
    cos, sin = table[:, : rope.dim // 2], table[:, rope.dim // 2 :]
    torch.cos(angles, out=cos)
    torch.sin(angles, out=sin)
    if isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        table *= rope.scaling.attention_factor
    return table


class RopeAxes:
    """Rotary embedding with three positions per token (M-RoPE). `cos_sin`: table of one position; `axes`: for each pair of dims,
    the index of the position that rotates it."""

    def __init__(self, cos_sin: Tensor, axes: tuple[int, ...]) -> None:
        self._cos_sin = cos_sin
        self._axes = torch.tensor([*axes, *axes], device=cos_sin.device)
        self._columns = torch.arange(2 * len(axes), device=cos_sin.device)

    @classmethod
    def of(cls, tables: Mapping[Rope | None, Tensor]) -> RopeAxes | None:
        """Return the M-RoPE embedding among a model's `tables`; None if there is none. A model with M-RoPE has no other rotary
        embedding."""
        found = [(rope, table) for rope, table in tables.items() if rope is not None and rope.axes]
        if not found:
            return None
        ((rope, table),) = found
        return cls(table, rope.axes)

    def rotated(self, step: ForwardStep) -> ForwardStep:
        """Return `step` with `rope_table` set: one row of cosines and sines for each token."""
        assert step.rope_positions is not None
        positions = step.rope_positions[self._axes].T  # [T, dim]
        return replace(step, rope_table=self._cos_sin[positions, self._columns].contiguous())


def inverse_frequencies(rope: Rope, num_positions: int) -> Tensor:
    """Return the rotation of each pair of dims in radians per position [dim / 2] float32. `num_positions`: the longest context."""
    wavelengths = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    match rope.scaling:
        case None:
            return 1.0 / wavelengths
        case LinearScaling(factor):
            return (1.0 / wavelengths) / factor
        case FactorScaling(factors):
            return (1.0 / wavelengths) / torch.tensor(factors, dtype=torch.float32)
        case LongRopeScaling(short, long, original_max_positions):
            factors = long if num_positions > original_max_positions else short
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
        case ProportionalScaling(rotary_pairs, factor):
            frequencies = (1.0 / wavelengths) / factor
            frequencies[rotary_pairs:] = 0.0
            return frequencies
        case Llama3Scaling():
            return _llama3(1.0 / wavelengths, rope.scaling)
        case YarnScaling():
            return _yarn(wavelengths, rope, rope.scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide low frequencies by the scaling factor, keep high frequencies, and interpolate between them."""
    rotations = scaling.original_max_positions / (2 * math.pi / frequencies)  # within the context trained on
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    fast = (rotations - low) / (high - low)
    blended = (1 - fast) * frequencies / scaling.factor + fast * frequencies
    slowed = torch.where(rotations < low, frequencies / scaling.factor, blended)
    return torch.where(rotations > high, frequencies, slowed)


def _yarn(wavelengths: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    """Do as `_llama3`, but interpolate linearly over the dims between `beta_fast` and `beta_slow` rotations."""
    low, high = (_dim_of_rotations(rotations, rope, scaling) for rotations in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    slow = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    fast = 1 - slow
    return 1.0 / (scaling.factor * wavelengths) * (1 - fast) + 1.0 / wavelengths * fast


def _dim_of_rotations(times: float, rope: Rope, scaling: YarnScaling) -> float:
    """Return the (fractional) dim that rotates `times` times within the original context length."""
    per_rotation = scaling.original_max_positions / (times * 2 * math.pi)
    return rope.dim * math.log(per_rotation) / (2 * math.log(rope.theta))
