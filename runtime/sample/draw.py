"""The draw: temperature, min-p, top-k, top-p in this order, each on what the last one left, then one random number.

The number is a hash of (seed, position) and nothing else, and each line is handled alone, so a request draws the same
tokens by itself and in any batch. Greedy lines take the largest logit."""

from __future__ import annotations

import torch

from runtime.api import SamplingParams
from runtime.batch import NOT_FINITE, RowBinding

CANDIDATES = 1024  # a selection of this many settles nearly every top-p; a full sort of the vocabulary settles the rest
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), keyed by (seed, position): two rounds of SplitMix64's finaliser (Steele et al. 2014)."""
    x = (seed & _MASK) ^ ((position * 0x9E3779B97F4A7C15) & _MASK)
    for _ in range(2):
        x = (x + 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return (x >> 11) * 2.0**-53


class Draw:
    def __init__(self) -> None:
        self._rows: dict[int, tuple[SamplingParams, int]] = {}  # rows that are not greedy

    def bind(self, row: int, binding: RowBinding) -> None:
        self._rows.pop(row, None)
        if not binding.params.greedy:
            self._rows[row] = binding.params, binding.seed

    def __call__(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> torch.Tensor:
        """logits [S, V] float32 -> ids [S] int64; NOT_FINITE where the model gave no usable logits."""
        largest, ids = logits.max(dim=-1)
        ids[~largest.isfinite()] = NOT_FINITE
        for line, (row, position) in enumerate(zip(rows, positions, strict=True)):
            drawn = self._rows.get(row)
            if drawn is not None and ids[line] != NOT_FINITE:
                params, seed = drawn
                ids[line] = draw_one(logits[line], params, uniform(seed, position))
        return ids


def draw_one(logits: torch.Tensor, params: SamplingParams, u: float) -> int:
    """One id from logits [V] by inverting the distribution's sum at `u` in [0, 1)."""
    scores = logits / params.temperature
    weights = torch.exp(scores - scores.max()).double()  # the largest is 1: min-p reads off directly
    if params.top_k == 0 and params.top_p >= 1.0:
        if params.min_p > 0.0:
            weights[weights < params.min_p] = 0.0
        return _invert(weights, u)
    weights, ids = _select(weights, params)
    return int(ids[_invert(weights, u)])


def _select(weights: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept weights, largest first, and their ids."""
    vocab_size = len(weights)
    num_kept = min(params.top_k or vocab_size, vocab_size)
    if params.min_p > 0.0:
        num_kept = min(num_kept, int((weights >= params.min_p).sum()))
    whole = num_kept == vocab_size
    num_candidates = min(num_kept, CANDIDATES) if params.top_p < 1.0 else num_kept
    while True:
        kept, ids = torch.topk(weights, num_candidates)
        if params.top_p >= 1.0:
            return kept, ids
        sums = kept.cumsum(0)
        mass = weights.sum() if whole else sums[-1]
        wanted = params.top_p * mass
        if num_candidates == num_kept or (whole and sums[-1] >= wanted):
            # The first that reaches the wanted mass is the last one kept.
            num = min(int(torch.searchsorted(sums, wanted)) + 1, num_candidates)
            return kept[:num], ids[:num]
        num_candidates = num_kept


def _invert(weights: torch.Tensor, u: float) -> int:
    sums = weights.cumsum(0)
    index = int(torch.searchsorted(sums, u * float(sums[-1]), right=True))
    return min(index, int(weights.nonzero()[-1]))
