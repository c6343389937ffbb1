"""Scores of text pairs: from a cross-encoder, from the cosine of two vectors, or from MaxSim of token vectors (ColBERT)."""

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
    """Scoring of text pairs. `request`: its inputs are the pairs, or all first texts and then all second texts. A single first
    text is compared with every second text. `by_odds`: the score is the pair's "yes" logit minus its "no" logit."""

    scoring: Scoring
    request: PoolRequest
    num_first: int
    num_second: int
    by_odds: bool = False

    async def scores(self, call: Call, pooled: Sequence[PooledInput]) -> list[float]:
        """Return one score per second text. `pooled`: one result per input of `request`, in order."""
        if self.scoring == "cross-encoder":
            return [each.numbers[-1] - (each.numbers[0] if self.by_odds else 0.0) for each in pooled]
        pairs = [(one.numbers, other.numbers) for one, other in self.sides(pooled)]
        return await call.run_pieces(sum(cost_of(*pair) for pair in pairs), _compared(pairs))

    def sides(self, pooled: Sequence[PooledInput]) -> list[tuple[PooledInput, ...]]:
        """Return the results that each score is computed from: one result for a pair, or two for separate texts."""
        if self.scoring == "cross-encoder":
            return [(each,) for each in pooled]
        first, second = list(pooled[: self.num_first]), pooled[self.num_first :]
        each_with = first * self.num_second if self.num_first == 1 else first
        return list(zip(each_with, second, strict=True))


def cosine(first: memoryview, second: memoryview) -> float:
    """Return the cosine similarity of two vectors [D], from -1 to 1. It is 0 if a vector is zero."""
    a, b = as_array(first), as_array(second)
    length = float((a @ a) * (b @ b)) ** 0.5
    return max(-1.0, min(1.0, float(a @ b) / length)) if length else 0.0


def max_sim(first: memoryview, second: memoryview) -> float:
    """Return the MaxSim of token vectors [Q, D] and [T, D]: the sum, over query tokens, of the largest dot product."""
    return float((as_array(first) @ as_array(second).T).max(axis=1).sum())


def cost_of(first: memoryview, second: memoryview) -> int:
    """Estimate the cost of comparing two results, as a number of characters to tokenise."""
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
