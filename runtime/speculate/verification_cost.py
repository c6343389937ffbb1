"""Verification cost: what drafts add to a step, in steps without any; learned from the steps that were. No clock of its own.

By number of rows, in powers of two: beside few rows a draft is nearly free, since the weights are read anyway; beside many it costs
what a row does. Of each such size are known how long steps without drafts take, and by least squares what it adds to have drafts at
all (the step before has to settle first, it may run without a graph, and what makes them may have to compute it, too) and what each
of them adds. Late steps count more than early ones, and what was assumed as much as a few."""

from __future__ import annotations

from typing import NamedTuple

_ASSUMED_SHARE = 0.05  # of a step, for having drafts at all
_MOST_ASSUMED = 0.5  # of a step, for each draft: so drafts that are mostly right are tried, whatever was timed at start
_KEPT = 0.97  # of what is known, from step to step with drafts
_KEPT_OF_PLAIN = 0.9
_ODD = 3.0  # a step that takes so many times what was expected counts as one at this border
_PRIOR_ANY, _PRIOR_EACH = 0.5, 4.0  # what the assumptions count, in steps, and in steps times drafts squared


class Cost(NamedTuple):
    """In steps without drafts: of having any, and of each."""

    any: float
    each: float


class _Size:
    """Steps of about so many rows. `plain_s`: of one without drafts; `followed`: if what makes them computed that step, too."""

    def __init__(self, assumed: Cost, plain_s: float, *, followed: bool) -> None:
        self.cost = assumed
        self._assumed = assumed
        self._plain_s = plain_s
        self._followed = followed
        self._num = self._drafts = self._squares = self._added = self._products = 0.0  # sums over steps with drafts

    def learn(self, num_drafts: int, took_s: float, *, followed: bool) -> None:
        if not num_drafts and followed != self._followed:
            if not followed:  # what such a step takes without drafts was only assumed
                self._plain_s, self._followed = took_s, False
            return
        expected = 1 + (self.cost.any + self.cost.each * num_drafts if num_drafts else 0.0)
        steps = min(max(took_s / self._plain_s, expected / _ODD), expected * _ODD)
        if num_drafts:
            self._learn_added(num_drafts, steps - 1)
        else:
            self._plain_s *= _KEPT_OF_PLAIN + (1 - _KEPT_OF_PLAIN) * steps

    def _learn_added(self, num_drafts: int, added: float) -> None:
        self._num = _KEPT * self._num + 1
        self._drafts = _KEPT * self._drafts + num_drafts
        self._squares = _KEPT * self._squares + num_drafts**2
        self._added = _KEPT * self._added + added
        self._products = _KEPT * self._products + num_drafts * added
        num, squares = self._num + _PRIOR_ANY, self._squares + _PRIOR_EACH
        sum_any = self._added + _PRIOR_ANY * self._assumed.any
        sum_each = self._products + _PRIOR_EACH * self._assumed.each
        each = max(0.0, (num * sum_each - self._drafts * sum_any) / (num * squares - self._drafts**2))
        self.cost = Cost(max(0.0, (sum_any - self._drafts * each) / num), each)


class VerificationCost:
    """`draft_share`: what a draft is assumed to take, in steps of a single row. `follow_share`: what it is assumed to add to a step
    that what makes drafts computes it, too, as long as there was none which it did not."""

    def __init__(self, draft_share: float, follow_share: float = 0.0) -> None:
        self.draft_share = draft_share
        self._follow_share = follow_share
        self._sizes: dict[int, _Size] = {}  # by the bit length of a number of rows

    def of(self, num_rows: int) -> Cost | None:
        """None before there was a step of about so many rows without drafts: nothing could be compared with it."""
        size = self._sizes.get(num_rows.bit_length())
        return None if size is None else size.cost

    def learn(self, num_rows: int, num_drafts: int, took_s: float, *, followed: bool = False) -> None:
        """A step of so many rows, none of a prompt, took so long, the wait before it included."""
        if not took_s:
            return  # shorter than the clock's resolution: nothing can be expressed in such steps
        if followed and not num_drafts:
            took_s /= 1 + self._follow_share
        size = self._sizes.get(num_rows.bit_length())
        if size is not None:
            size.learn(num_drafts, took_s, followed=followed)
        elif not num_drafts:
            self._sizes[num_rows.bit_length()] = _Size(self.assumed(num_rows), took_s, followed=followed)

    def assumed(self, num_rows: int) -> Cost:
        """Before anything is known: the rows of a step take as long as so many drafts."""
        share = min(self.draft_share, _MOST_ASSUMED)
        return Cost(_ASSUMED_SHARE, share / (1 + share * (num_rows - 1)))
