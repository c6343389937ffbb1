"""Speculation: the drafts of a step. Asks a proposer, says how many of its guesses are worth checking, counts what came of them.

A step's drafts are worth it where they raise the tokens that are gained in a time. At a rate of `rate` tokens a step, another draft
of a row has to bring as many as pass while it is checked: its price. A row's drafts come with falling chances, so it gets those
above the price; and if all drafts of the step together do not raise the rate there are none. What drafts take is learned from steps
(`VerificationCost`), how likely they are right from guesses (`Acceptance`), checked ones or not: where drafts do not pay, some are
made now and then to be compared alone. Now and then a few are checked where it does not seem to pay, and none where it does, so
that costs do not stay what they were once. Knows no clock, no tensors and no blocks."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import NamedTuple

from runtime.batch import Sample, ScheduledBatch
from runtime.sequence import Sequence
from runtime.speculate.acceptance import Acceptance, Chances
from runtime.speculate.proposer import Proposer
from runtime.speculate.verification_cost import Cost, VerificationCost

LOOK_EVERY = 8  # steps, of which a row that drafts nothing is asked in one
PROBE_EVERY = 256  # steps in which drafts seemed not to pay; then some are checked
PROBED_ROWS = 4
PLAIN_EVERY = 128  # steps with drafts, of which one does without, so that it stays known what such a step takes
WORTH_WHILE = 1.02  # tokens gained in a time, of those without drafts
_KEPT, _PRIOR = (
    0.995,
    10.0,
)  # of what drafts brought, from one to the next; and drafts that were as expected, to begin with
GUESSED = 4  # tokens of a guess that is only compared


def forced_ids(sequence: Sequence, most: int) -> tuple[int, ...]:
    """What its matchers leave of it as the only way to go on, behind all that is known or in flight."""
    if sequence.forced is None:
        return ()
    first = sequence.num_output_tokens + sequence.num_in_flight - sequence.forced.start
    return sequence.forced.ids[first : first + most] if first >= 0 else ()


class Plan(NamedTuple):
    """Of a step. `probing`: drafts did not pay for long, and a few are tried. `price`: how likely a draft has to be right."""

    cost: Cost
    probing: bool
    price: float

    def asked(self, could_draft: Several[tuple[Sequence, int]]) -> Several[tuple[Sequence, int]]:
        return could_draft[:PROBED_ROWS] if self.probing else could_draft


class Speculation:
    """`most`: drafts of a row in a step. `cost` None: as many as that always, whatever they cost. `compares`: guesses that no step
    checks tell something, too; not where chance says which are right, and only in a step. `longest`: tokens of a step with drafts,
    where these are weighed; None: any. `on_device`: drafts are made behind a
    step, where their ids stay."""

    on_device = False

    def __init__(
        self, proposer: Proposer, most: int, cost: VerificationCost | None = None, *, compares: bool = True,
        longest: int | None = None,
    ) -> None:  # fmt: skip
        self.num_drafts = 0  # rows of steps that had some
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_at = [0] * most  # by position in the draft
        self._proposer = proposer
        self._most = most
        self._cost = cost
        self._compares = compares
        self._longest = longest
        self._chances = Chances()
        self._rows: dict[int, Acceptance] = {}  # by number of the sequence
        self._rate = 1.0  # tokens gained for each that would be without drafts, as planned lately
        self._num_asked = 0
        self._num_refused = 0  # times that drafts did not pay since they last did
        self._num_drafted = 0  # times that they did
        self._expected = self._were_right = 0.0

    @property
    def most(self) -> int:
        return self._most

    def guesses(self, could_draft: Several[tuple[Sequence, int]], num_rows: int) -> dict[int, tuple[int, ...]]:
        """Drafts by number of the sequence, at most so many as stand beside each, for a step of `num_rows`. What is certain is
        weighed against nothing: it takes what it would as a row of a later step, and its row waits for masks anyway."""
        certain = {
            sequence.number: ids
            for sequence, most in could_draft
            if sequence.forced is not None and (ids := forced_ids(sequence, min(most, self._most)))
        }
        others = [each for each in could_draft if each[0].number not in certain] if certain else could_draft
        return certain | (self._all_guesses(others) if self._cost is None else self._weighed(others, num_rows))

    def _weighed(self, could_draft: Several[tuple[Sequence, int]], num_rows: int) -> dict[int, tuple[int, ...]]:
        """Guesses, where they are likely enough for what they cost."""
        plan = self._begin(num_rows)
        if plan is None:
            return {}
        guesses: dict[int, tuple[int, ...]] = {}
        gain, room = 0.0, self._room(num_rows)
        for sequence, most in plan.asked(could_draft):
            row, most_now = self._row(sequence), min(most, self._most, room)
            num = most_now if plan.probing else row.num_worth(plan.price, most_now)
            if not num and (sequence.number + self._num_asked) % LOOK_EVERY:
                continue
            guess = self._proposer.propose(sequence, num or min(most, GUESSED))
            row.guessed(guess)
            if num and guess:
                guesses[sequence.number] = tuple(guess)
                gain += row.expected(len(guess))
                room -= len(guess)
        if not self._pays(plan, gain, sum(map(len, guesses.values())), num_rows):
            return {}
        return guesses if self._num_drafted % PLAIN_EVERY else {}

    def to_propose(self, could_draft: Several[tuple[Sequence, int]], num_rows: int) -> dict[int, int]:
        """Where drafts come from the device: see `DeviceSpeculation`."""
        return {}

    def follows(self, num_rows: int) -> bool:
        """Whether what makes drafts on the device computes the next step, of so many rows, too: see `DeviceSpeculation`."""
        return True

    def gain(self, num_rows: int) -> float:
        """By how much of a step more a step of so many rows would bring if all of them had drafts, by what is known of all."""
        cost = None if self._cost is None else self._cost.of(num_rows)
        if cost is None:
            return 0.0
        row = Acceptance(self._chances)
        num = row.num_worth(cost.each * num_rows, self._most)
        rate = (1 + row.expected(num) * self._calibration) / (1 + cost.any + cost.each * num * num_rows)
        return rate - 1 if rate >= WORTH_WHILE else 0.0

    def steps_to_compute(self, num_tokens: int) -> float:
        """How many steps of a single row it takes to compute so many tokens anew, as is assumed; none where nothing is weighed."""
        return 0.0 if self._cost is None else self._cost.draft_share * num_tokens

    def is_on_host(self, sequence: Sequence) -> bool:
        """Whether its drafts are guessed by the host."""
        return True

    def _all_guesses(self, could_draft: Several[tuple[Sequence, int]]) -> dict[int, tuple[int, ...]]:
        found = {
            sequence.number: tuple(self._proposer.propose(sequence, min(most, self._most)))
            for sequence, most in could_draft
        }
        return {number: ids for number, ids in found.items() if ids}

    def _room(self, num_rows: int) -> int:
        """How many drafts a step of so many rows has at most."""
        return num_rows * self._most if self._longest is None else max(0, self._longest - num_rows)

    def _row(self, sequence: Sequence) -> Acceptance:
        row = self._rows.get(sequence.number)
        if row is None:
            row = self._rows[sequence.number] = Acceptance(self._chances_of(sequence))
        return row

    def _chances_of(self, sequence: Sequence) -> Chances:
        return self._chances

    def _begin(self, num_rows: int) -> Plan | None:
        """What a step of so many rows is planned by; None where nobody knows yet what one takes."""
        assert self._cost is not None
        self._num_asked += 1
        cost = self._cost.of(num_rows)
        if cost is None:
            return None
        return Plan(cost, self._num_refused >= PROBE_EVERY, cost.each * num_rows * self._rate)

    def _pays(self, plan: Plan, gain: float, num_drafts: int, num_rows: int) -> bool:
        """Whether drafts of which so many should be right are worth their step, or are to be tried."""
        rate = 1.0
        if num_drafts:
            rate = (1 + gain * self._calibration / num_rows) / (1 + plan.cost.any + plan.cost.each * num_drafts)
        self._rate = max(1.0, rate)
        if rate < WORTH_WHILE and not (plan.probing and num_drafts):
            self._num_refused += 1
            return False
        self._num_refused = 0
        self._num_drafted += 1
        return True

    @property
    def _calibration(self) -> float:
        """Drafts that were right for each that was expected to be: those which are chosen were thought too well of."""
        return (self._were_right + _PRIOR) / (self._expected + _PRIOR)

    def settled(self, sequence: Sequence, num_drafts: int, token_ids: Several[int]) -> None:
        """A step brought `sequence` these tokens, `num_drafts` of it having been checked; they are not in its books yet."""
        row = self._rows.get(sequence.number)
        if row is not None:
            if num_drafts:
                self._expected = _KEPT * self._expected + row.expected(num_drafts)
                self._were_right = _KEPT * self._were_right + max(0, len(token_ids) - 1)
            self._learn(sequence, row, num_drafts, token_ids)
        if not num_drafts or not token_ids:
            return
        num_accepted = len(token_ids) - 1
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        sequence.num_draft_tokens += num_drafts
        sequence.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_at[position] += 1

    def _learn(self, sequence: Sequence, row: Acceptance, num_drafts: int, token_ids: Several[int]) -> None:
        row.gained(token_ids if num_drafts or self._compares else ())

    def finished(self, sequence: Sequence) -> None:
        self._rows.pop(sequence.number, None)
        self._proposer.finished(sequence)

    def took(self, batch: ScheduledBatch, took_s: float) -> None:
        """`batch` took so long, from the end of the step before it to its own. Those with prompts or late masks tell nothing."""
        if self._cost is None:
            return
        num_drafts = 0
        for row in batch.rows:
            if (
                type(row.work) is not Sample
                or row.work.masked
                or (row.num_tokens != 1 + row.work.num_drafts and row.restart < 0)
                or row.binding
            ):
                return
            num_drafts += row.num_tokens - 1  # with what was right and is computed again, for the sake of states
        if batch.rows:
            self._cost.learn(len(batch.rows), num_drafts, took_s, followed=batch.follows)
