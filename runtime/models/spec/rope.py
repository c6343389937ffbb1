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
    """Division of each frequency by its own factor; there are `dim / 2` factors."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Division of each frequency by its own factor: from `long` if contexts may exceed `original_max_positions`, else from
    `short`. `attention_factor` multiplies cosines and sines in both cases."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """RoPE of the first `rotary_pairs` pairs only, with the frequencies of a full rotation; all are divided by `factor`."""

    rotary_pairs: int
    factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the first `dim` (even) of a head's dims. `scaling` None: no scaling. `axes`: for each pair of dims, the
    index of the position that rotates it: time, height or width (M-RoPE, Qwen2-VL 2024); () for a single position."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()
