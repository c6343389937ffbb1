"""Routing: by what rule a router's logits choose experts for a token, and with which weights. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Score = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["best", "top-2 sum"]


@dataclass(frozen=True, slots=True)
class Routing:
    """Each token takes the `top_k` experts of highest choice: the score of their logit plus, where there is one, a
    correction bias that only choosing sees (Wang et al. 2024). An expert's weight is its score, divided by the sum of the
    chosen ones (at least `min_sum`) if `renormalize`, times `scale`.

    With `num_groups` > 1 the experts stand in as many equal groups, and only those of the `top_groups` best groups can be
    chosen; a group is judged by its best choice or the sum of its two best (DeepSeek-V2 and V3, 2024).

    "sparsemixer" (Liu et al. 2023) takes the largest logits one by one; a weight is its softmax among the logits not yet
    taken and within 2 `jitter` of it, relatively. None of the other rules apply to it."""

    top_k: int
    score: Score = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "best"
    min_sum: float = 1e-20
    jitter: float = 0.0
