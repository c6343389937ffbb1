"""Verification cost: time that drafts add to a step, relative to steps without drafts, learned from past steps. Has no clock.

It is learned by number of rows, in powers of two. With few rows a draft is nearly free, since the weights are read anyway;
with many rows it costs as much as a row. Each size has the time of steps without drafts, and least-squares estimates of two
costs: of having any drafts (the previous step must settle first, or a draft model must follow), and of each draft. Recent
steps weigh more, and the initial assumptions weigh as much as a few steps."""

from __future__ import annotations

from typing import NamedTuple

_ASSUMED_SHARE = 0.05  # assumed cost of any drafts
_MOST_ASSUMED = 0.5  # maximum of the assumed cost of a draft, so that drafts that are mostly right are tried
_KEPT = 0.97  # weight of the past, from step to step with drafts
_KEPT_OF_PLAIN = 0.9  # the same for steps without drafts
_ODD = 3.0  # maximum ratio of a step's time to the expected time, either way, that is learned from
_PRIOR_ANY, _PRIOR_EACH = 0.5, 4.0  # weights of the assumptions, in steps, and in steps times drafts squared


class Cost(NamedTuple):
    """Cost of any drafts and of each draft, in steps without drafts."""

    any: float
    each: float


class _Size:
    """Steps of about as many rows. `plain_s`: time of a step without drafts; `followed`: whether a draft model followed it."""

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
    """Cost of drafts by number of rows.

    `draft_share`: assumed cost of a draft, in steps of one row. `follow_share`: assumed cost of following a step, until a step
    that was not followed is known."""

    def __init__(self, draft_share: float, follow_share: float = 0.0) -> None:
        self.draft_share = draft_share
        self._follow_share = follow_share
        self._sizes: dict[int, _Size] = {}  # by the bit length of a number of rows

    def of(self, num_rows: int) -> Cost | None:
        """Return the cost for `num_rows`, or None before a step of about as many rows without drafts was observed."""
        size = self._sizes.get(num_rows.bit_length())
        return None if size is None else size.cost

    def learn(self, num_rows: int, num_drafts: int, took_s: float, *, followed: bool = False) -> None:
        """Learn from a step of `num_rows` without prompts, which took `took_s`, including the wait before it."""
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
        """Return the assumed cost: a row of a step costs as much as a draft."""
        share = min(self.draft_share, _MOST_ASSUMED)
        return Cost(_ASSUMED_SHARE, share / (1 + share * (num_rows - 1)))
