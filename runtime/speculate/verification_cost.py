"""Verification cost: time that draft tokens add to a step, relative to a step without them. Learned from past steps.

The cost is learned by number of rows, in powers of two. With few rows a draft token is nearly free, since the weights are read
anyway; with many rows it costs as much as a row. For each size, the time of steps without draft tokens is stored, and least
squares estimate two costs. One is that of a step with any draft tokens, which waits for earlier results or a draft model. The
other is that of each draft token. Recent steps weigh more. The initial assumptions weigh as much as a few steps. Reads no
clock."""

from __future__ import annotations

from typing import NamedTuple

_ASSUMED_SHARE = 0.05  # assumed cost of having any draft tokens
_MOST_ASSUMED = 0.5  # maximum assumed cost of a draft token, so that well accepted ones are tried
_KEPT = 0.97  # weight of the past, per step with draft tokens
_KEPT_OF_PLAIN = 0.9  # likewise for steps without
_ODD = 3.0  # maximum ratio, in both directions, of a step's time to the expected one; other steps are ignored
_PRIOR_ANY, _PRIOR_EACH = 0.5, 4.0  # weights of the assumptions: in steps, and in steps times draft tokens squared


class Cost(NamedTuple):
    """Costs relative to a step without draft tokens. `any`: of a step with draft tokens. `each`: of each draft token."""

    any: float
    each: float


class _Size:
    """State of one step size. `plain_s`: seconds of a step without draft tokens. `followed`: a draft model ran after it."""

    def __init__(self, assumed: Cost, plain_s: float, *, followed: bool) -> None:
        self.cost = assumed
        self._assumed = assumed
        self._plain_s = plain_s
        self._followed = followed
        self._num = self._drafts = self._squares = self._added = self._products = 0.0  # sums over steps with drafts

    def learn(self, num_drafts: int, took_s: float, *, followed: bool) -> None:
        if not num_drafts and followed != self._followed:
            if not followed:  # the time of such a step without draft tokens was only assumed
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
    """Cost of draft tokens by number of rows.

    `draft_share`: assumed cost of a draft token, as a multiple of the time of a step with one row. `follow_share`: assumed cost
    of following a step (see `Resting`), used until a step without following was observed."""

    def __init__(self, draft_share: float, follow_share: float = 0.0) -> None:
        self.draft_share = draft_share
        self._follow_share = follow_share
        self._sizes: dict[int, _Size] = {}  # by the bit length of a number of rows

    def of(self, num_rows: int) -> Cost | None:
        """Return the cost for `num_rows` rows, or None until a step of similar size without draft tokens was observed."""
        size = self._sizes.get(num_rows.bit_length())
        return None if size is None else size.cost

    def learn(self, num_rows: int, num_drafts: int, took_s: float, *, followed: bool = False) -> None:
        """Learn from a step of `num_rows` rows, without prompts, that took `took_s` seconds, including the wait before it."""
        if not took_s:
            return  # shorter than the clock's resolution
        if followed and not num_drafts:
            took_s /= 1 + self._follow_share
        size = self._sizes.get(num_rows.bit_length())
        if size is not None:
            size.learn(num_drafts, took_s, followed=followed)
        elif not num_drafts:
            self._sizes[num_rows.bit_length()] = _Size(self.assumed(num_rows), took_s, followed=followed)

    def assumed(self, num_rows: int) -> Cost:
        """Return the cost assumed at start-up: a draft token costs as much as a row."""
        share = min(self.draft_share, _MOST_ASSUMED)
        return Cost(_ASSUMED_SHARE, share / (1 + share * (num_rows - 1)))
