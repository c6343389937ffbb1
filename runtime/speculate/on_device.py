"""Drafts that the device makes behind a step (`runtime/runner/drafter.py`): the host says how many there are to be, and learns what
they were when they have been checked. So nothing waits for them: steps with such drafts go out one step ahead, as any. Rows whose
drafts the host has to know have some of the host's in the same steps."""

from __future__ import annotations

from collections.abc import Sequence as Several

from runtime.batch import ON_DEVICE, Sample, ScheduledBatch
from runtime.sequence import Sequence
from runtime.speculate.acceptance import Acceptance, Chances
from runtime.speculate.following import Following
from runtime.speculate.proposer import Proposer
from runtime.speculate.speculation import GUESSED, LOOK_EVERY, PLAIN_EVERY, Plan, Speculation, forced_ids
from runtime.speculate.verification_cost import VerificationCost


class DeviceSpeculation(Speculation):
    """Says with each step how many drafts the device makes behind it; the next step checks all of them. So what drafts take and
    what they bring belong to two steps, and only steps that both check and make some are learned from, or do neither.

    `proposer` guesses for sequences whose drafts have to be known on the host, since matchers have masks for them, and, if it reads
    `predictions`, for those that have one. What it guesses stands behind known ids: where some are in flight, a sequence that is to
    have drafts is in no step until they have settled. Others do not wait for it, and it waits only where it gains more than the
    token of the step that it misses.

    `rests`: what makes drafts on the device has work with every step, which it is spared where drafts do not pay (`Following`), if
    `cost` says what pays."""

    on_device = True

    def __init__(
        self, proposer: Proposer, most: int, cost: VerificationCost | None = None, *, predictions: bool = False,
        rests: bool = False, longest: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(proposer, most, cost, longest=longest)
        self._reads_predictions = predictions
        self._chances_on_host = Chances()
        self._following = Following() if rests and cost is not None else None

    def follows(self, num_rows: int) -> bool:
        return self._following is None or self._following.follows(num_rows)

    def guesses(self, could_draft: Several[tuple[Sequence, int]], num_rows: int) -> dict[int, tuple[int, ...]]:
        guesses: dict[int, tuple[int, ...]] = {}
        for sequence, most in could_draft:
            most = min(most, self._most)
            if self.is_on_host(sequence):
                ids = self._on_host(sequence, most, num_rows)
            else:
                ids = (ON_DEVICE,) * min(most, sequence.num_proposed)
            if ids:
                guesses[sequence.number] = tuple(ids)
        return guesses

    def is_on_host(self, sequence: Sequence) -> bool:
        return sequence.has_matchers or (self._reads_predictions and bool(sequence.request.prediction))

    def _on_host(self, sequence: Sequence, most: int, num_rows: int) -> Several[int]:
        waits = sequence.num_in_flight > 0
        if certain := forced_ids(sequence, most):
            return certain if len(certain) > waits else ()
        row, num = self._row(sequence), most
        if self._cost is not None:
            cost = self._cost.of(num_rows) or self._cost.assumed(num_rows)
            num = row.num_worth(cost.each * num_rows, most)
        if not num and (sequence.number + sequence.num_output_tokens) % LOOK_EVERY:
            return ()
        guess = self._proposer.propose(sequence, num or min(most, GUESSED))
        row.guessed(guess)
        if not num or (waits and self._cost is not None and row.expected(len(guess)) <= 1):
            return ()
        return guess

    def to_propose(self, could_draft: Several[tuple[Sequence, int]], num_rows: int) -> dict[int, int]:
        """How many drafts there are to be behind the next step, by number of the sequence, at most so many as stand beside each."""
        if self._cost is None:
            return {sequence.number: min(most, self._most) for sequence, most in could_draft}
        plan = self._begin(num_rows)
        if plan is None:
            return {}
        nums: dict[int, int] = {}
        gain, room = 0.0, self._room(num_rows)
        for sequence, most in plan.asked(could_draft):
            row, most = self._row(sequence), min(most, self._most, room)
            num = most if plan.probing else row.num_worth(plan.price, most)
            if not num and (sequence.number + self._num_asked) % LOOK_EVERY == 0:
                num = min(1, most)  # or nobody would learn that it has become easier
            if num:
                nums[sequence.number] = num
                gain += row.expected(num)
                room -= num
        pays = self._pays(plan, gain, sum(nums.values()), num_rows)
        if self._following is not None:
            self._following.note(num_rows, pays=pays and not plan.probing)
        if not pays:
            return {}
        pauses = self._num_drafted % PLAIN_EVERY < 2  # two steps, of which the second neither checks nor makes any
        return {} if pauses else nums

    def _begin(self, num_rows: int) -> Plan | None:
        plan = super()._begin(num_rows)
        if plan is None or self._following is None:
            return plan
        return plan._replace(probing=self._following.probes(num_rows))

    def _chances_of(self, sequence: Sequence) -> Chances:
        return self._chances_on_host if self.is_on_host(sequence) else self._chances

    def _learn(self, sequence: Sequence, row: Acceptance, num_drafts: int, token_ids: Several[int]) -> None:
        if self.is_on_host(sequence):
            row.gained(token_ids)
        elif token_ids:
            row.checked(num_drafts, len(token_ids) - 1)

    def took(self, batch: ScheduledBatch, took_s: float) -> None:
        makes = any(row.num_proposed for row in batch.rows)
        checks = any(row.work.num_drafts for row in batch.rows if type(row.work) is Sample)
        if makes == checks:
            super().took(batch, took_s)
