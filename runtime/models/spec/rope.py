"""Rotary embeddings: by what angle each pair of a head's dims is rotated, and how that is scaled for long contexts."""

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
    """Each frequency divided by its own number; `dim / 2` of them."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency divided by its own number: one of `long` where contexts may pass `original_max_positions`, of `short`
    where they may not. `attention_factor` multiplies cosines and sines either way."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """RoPE that rotates only the first `rotary_pairs` pairs, as they would be if all were; frequencies divided by `factor`."""

    rotary_pairs: int
    factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates the first `dim` of a head's dims, which is even. None scales nothing. `axes`: for each pair of dims, which of a
    token's three positions turns it, time, height or width (M-RoPE, Qwen2-VL 2024); () where there is but one."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()
