"""Rotary embeddings: the rotation angle of each pair of a head's dims, and scaling for long contexts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN scaling of a rotary embedding. `attention_factor` multiplies cosines and sines."""

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """RoPE scaling that divides each of the `dim / 2` frequencies by its own factor."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """RoPE scaling that divides each frequency by its own factor: from `long` if the longest context exceeds
    `original_max_positions`, else from `short`. `attention_factor` multiplies cosines and sines in both cases."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """RoPE of the first `rotary_pairs` pairs of dims only. Frequencies are those of a full rotation, divided by `factor`."""

    rotary_pairs: int
    factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `dim` (even) dims of a head. `scaling`: None means no scaling. `axes`: for each pair of
    dims, the index of the position that rotates it: time, height or width (M-RoPE, Qwen2-VL 2024). () means that tokens have one
    position."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()
