"""Scores of text pairs: by a cross-encoder's head, by cosine of vectors, or by MaxSim of token vectors (ColBERT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.api.pooling.request import PoolRequest
from server.api.pooling.run import PooledInput
from server.api.pooling.vectors import as_array
from server.http.call import Call
from server.http.offload import Pieces
from server.models.pooling import Scoring

NUMBERS_PER_CHAR = 4_000  # multiplied while a character is tokenised
PAIR_CHARS = 20
PIECE_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of texts. `request`: the pairs, or all first texts followed by all second ones; a single first text is
    compared with all. `by_odds`: the score is the difference of a pair's "yes" and "no" logits."""

    scoring: Scoring
    request: PoolRequest
    num_first: int
    num_second: int
    by_odds: bool = False

    async def scores(self, call: Call, pooled: Sequence[PooledInput]) -> list[float]:
        """Return one score per second text. `pooled`: results of the inputs of `request`, in order."""
        if self.scoring == "cross-encoder":
            return [each.numbers[-1] - (each.numbers[0] if self.by_odds else 0.0) for each in pooled]
        pairs = [(one.numbers, other.numbers) for one, other in self.sides(pooled)]
        return await call.run_pieces(sum(cost_of(*pair) for pair in pairs), _compared(pairs))

    def sides(self, pooled: Sequence[PooledInput]) -> list[tuple[PooledInput, ...]]:
        """Return the results behind each score: one of a pair, or two of separate texts."""
        if self.scoring == "cross-encoder":
            return [(each,) for each in pooled]
        first, second = list(pooled[: self.num_first]), pooled[self.num_first :]
        each_with = first * self.num_second if self.num_first == 1 else first
        return list(zip(each_with, second, strict=True))


def cosine(first: memoryview, second: memoryview) -> float:
    """Return the cosine of two vectors [D], -1 to 1; 0 if one is a zero vector."""
    a, b = as_array(first), as_array(second)
    length = float((a @ a) * (b @ b)) ** 0.5
    return max(-1.0, min(1.0, float(a @ b) / length)) if length else 0.0


def max_sim(first: memoryview, second: memoryview) -> float:
    """Return the MaxSim of token vectors [Q, D] and [T, D]: for each query token the largest dot product, summed."""
    return float((as_array(first) @ as_array(second).T).max(axis=1).sum())


def cost_of(first: memoryview, second: memoryview) -> int:
    """Return the cost of comparing two results, in characters of tokenising."""
    products = first.nbytes // first.itemsize * (len(second) if second.ndim == 2 else 1)
    return PAIR_CHARS + products // NUMBERS_PER_CHAR


def _compared(pairs: Sequence[tuple[memoryview, memoryview]]) -> Pieces[list[float]]:
    found: list[float] = []
    since_rest = 0
    for first, second in pairs:
        if since_rest > PIECE_CHARS:
            since_rest = 0
            yield
        found.append(max_sim(first, second) if first.ndim == 2 else cosine(first, second))
        since_rest += cost_of(first, second)
    return found
