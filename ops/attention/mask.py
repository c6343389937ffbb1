"""Attention masks: which keys a query may see, apart from windows. Values of `AttentionHeads.mask`, and what kernels say to them.

"causal": those at its own position and before it. "full": all of its row, or with a window those less than it away on either
side. "prefix_full": as causal, and those of a prefix of `AttentionMeta.prefix_lens` tokens see each other all (prefix language
models, Raffel et al. 2020). What a query sees behind it must be of its own step: with "full" that is the whole row, with
"prefix_full" the prefix."""

from __future__ import annotations

from ops.registry import ShapeClass

CAUSAL, FULL, PREFIX_FULL = "causal", "full", "prefix_full"
MASKS = (CAUSAL, FULL, PREFIX_FULL)


def causal_only(case: ShapeClass) -> str | None:
    """The refusal of kernels that compute nothing but causal masks."""
    return None if case.mask == CAUSAL else "computes causal attention only"
