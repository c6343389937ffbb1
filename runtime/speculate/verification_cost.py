"""Verification cost: what drafts add to a step, in steps without any; learned from the steps that were. No clock of its own.

By number of rows, in powers of two: beside few rows a draft is nearly free, since the weights are read anyway; beside many it costs
what a row does. Of each such size three costs are learned: of a step as it is, of having drafts at all (the step before has to
settle first, and it may run without a graph), and of each draft."""

from __future__ import annotations

from typing import NamedTuple

from runtime.step_cost import Factors

_ASSUMED_SHARE = 0.05  # of a step, for having drafts at all
_EVERY = 4  # steps without drafts, of which there are many, that one is learned of


class Cost(NamedTuple):
    """In steps without drafts: of having any, and of each."""

    any: float
    each: float


class _Size:
    """`step_s`: what a step is assumed to take, the first one that was."""

    def __init__(self, step_s: float, assumed: Cost) -> None:
        self.factors = Factors(3)
        self.step_s = step_s
        self.assumed = assumed
        self.num_steps = 0


class VerificationCost:
    """`draft_share`: what a draft is assumed to take, in steps of a single row."""

    def __init__(self, draft_share: float) -> None:
        self._draft_share = draft_share
        self._sizes: dict[int, _Size] = {}  # by the bit length of a number of rows

    def of(self, num_rows: int) -> Cost:
        size = self._sizes.get(num_rows.bit_length())
        assumed = self._assumed(num_rows) if size is None else size.assumed
        if size is None:
            return assumed
        step, any_, each = size.factors.values
        return Cost(assumed.any * any_ / step, assumed.each * each / step)

    def learn(self, num_rows: int, num_drafts: int, took_s: float) -> None:
        """A step of so many rows, none of a prompt, took so long, the wait before it included."""
        key = num_rows.bit_length()
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size(took_s, self._assumed(num_rows))
        size.num_steps += 1
        if not num_drafts and size.num_steps % _EVERY:
            return
        any_s, each_s = size.assumed.any * size.step_s, size.assumed.each * size.step_s
        size.factors.learn([size.step_s, any_s if num_drafts else 0.0, each_s * num_drafts], took_s)

    def _assumed(self, num_rows: int) -> Cost:
        """The rows of a step take as long as so many drafts."""
        share = self._draft_share
        return Cost(_ASSUMED_SHARE, share / (1 + share * (num_rows - 1)))
