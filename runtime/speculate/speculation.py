"""Speculation: selects draft tokens for a step, and records their acceptance.

Draft tokens pay if they increase tokens per second. The price of a draft token is the step time that it adds, expressed as the
number of tokens generated in that time. A sequence gets draft tokens whose acceptance probability exceeds the price. A step has
draft tokens only if all of them together raise the rate. Costs are learned from steps (`VerificationCost`), probabilities from
drafts (`Acceptance`), whether verified or not. Where drafts do not pay, some are made for comparison only. Some steps that
could have drafts run without, to keep the baseline time current. Uses no clock, tensors or blocks."""

from __future__ import annotations

from collections.abc import Sequence as Several

from runtime.batch import ON_DEVICE, Sample, ScheduledBatch
from runtime.sequence import Sequence
from runtime.speculate.acceptance import Acceptance, Chances
from runtime.speculate.proposer import Proposer
from runtime.speculate.verification_cost import Cost, VerificationCost

LOOK_EVERY = 8  # one in so many steps makes a draft for comparison, for sequences without draft tokens
PLAIN_EVERY = 256  # one in so many steps with draft tokens runs without
WORTH_WHILE = 1.02  # minimum rate of tokens with drafts, relative to the rate without
GUESSED = 4  # tokens of a draft that is only compared
PROBED_ROWS = 4  # sequences with draft tokens in a probing step
_KEPT = 0.995  # weight of the past in calibration, per draft
_PRIOR = 10.0  # weight of the initial ratio of 1, in draft tokens


def forced_ids(sequence: Sequence, most: int) -> tuple[int, ...]:
    """Return up to `most` token ids that the sequence's matchers force after the tokens that are known or in flight."""
    if sequence.forced is None:
        return ()
    first = sequence.num_output_tokens + sequence.num_in_flight - sequence.forced.start
    return sequence.forced.ids[first : first + most] if first >= 0 else ()


class Speculation:
    """Speculative decoding with draft tokens from the host.

    `most`: maximum draft tokens of a sequence in a step. `cost`: if None, always use the maximum. `compares`: compare
    unverified drafts with sampled tokens; False if acceptance is synthetic. `longest`: maximum tokens of a step with drafts."""

    on_device = False
    rests = False  # whether making draft tokens costs time in every step, which can be paused if they do not pay

    def __init__(
        self, proposer: Proposer, most: int, cost: VerificationCost | None = None, *, compares: bool = True,
        longest: int | None = None,
    ) -> None:  # fmt: skip
        self.num_drafts = 0  # rows with draft tokens
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_at = [0] * most  # by position in the draft
        self.paid = True  # whether draft tokens were expected to pay in the last planned step
        self._proposer = proposer
        self._most = most
        self._cost = cost
        self._compares = compares
        self._longest = longest
        self._chances = Chances()
        self._rows: dict[int, Acceptance] = {}  # by sequence number
        self._num_asked = 0
        self._num_drafted = 0  # number of steps in which draft tokens paid
        self._expected = self._were_right = 0.0

    # --- a step ---------------------------------------------------------------------------------------------------

    def guesses(self, could_draft: Several[tuple[Sequence, int]], num_rows: int) -> dict[int, tuple[int, ...]]:
        """Return draft tokens for a step of `num_rows` rows, by sequence number. `could_draft`: (sequence, maximum number).

        Forced ids are always included. They cost the same as in later steps, and their row would have to wait for masks."""
        certain = {
            sequence.number: ids
            for sequence, most in could_draft
            if sequence.forced is not None and (ids := forced_ids(sequence, min(most, self._most)))
        }
        others = [each for each in could_draft if each[0].number not in certain] if certain else could_draft
        return certain | (self._all_guesses(others) if self._cost is None else self._weighed(others, num_rows))

    def _all_guesses(self, could_draft: Several[tuple[Sequence, int]]) -> dict[int, tuple[int, ...]]:
        found = {
            sequence.number: tuple(self._proposer.propose(sequence, min(most, self._most)))
            for sequence, most in could_draft
        }
        return {number: ids for number, ids in found.items() if ids}

    def _weighed(self, could_draft: Several[tuple[Sequence, int]], num_rows: int) -> dict[int, tuple[int, ...]]:
        cost = self._cost_of(num_rows)
        if cost is None:
            return {}
        guesses: dict[int, tuple[int, ...]] = {}
        gain, room = 0.0, self._room(num_rows)
        for sequence, most in could_draft:
            row = self._row(sequence)
            num = row.num_worth(cost.each * num_rows, min(most, self._most, room))
            if not num and (sequence.number + self._num_asked) % LOOK_EVERY:
                continue
            guess = self._proposer.propose(sequence, num or min(most, GUESSED))
            row.guessed(guess)
            if num and guess:
                guesses[sequence.number] = tuple(guess)
                gain += row.expected(len(guess))
                room -= len(guess)
        if not self._pays(cost, gain, sum(map(len, guesses.values())), num_rows):
            return {}
        return guesses if self._num_drafted % PLAIN_EVERY else {}

    def to_propose(
        self, could_draft: Several[tuple[Sequence, int]], num_rows: int, *, probes: bool = False
    ) -> dict[int, int]:
        """Return the number of draft tokens that the device makes after the next step, by sequence number; {} for host drafts."""
        return {}

    def is_on_host(self, sequence: Sequence) -> bool:
        """Return True if the draft tokens of `sequence` are made on the host."""
        return True

    def _room(self, num_rows: int) -> int:
        """Return the maximum number of draft tokens in a step of `num_rows` rows."""
        return num_rows * self._most if self._longest is None else max(0, self._longest - num_rows)

    def _cost_of(self, num_rows: int) -> Cost | None:
        """Return the cost of draft tokens in a step of `num_rows` rows. None until such a step without draft tokens was timed."""
        assert self._cost is not None
        self._num_asked += 1
        return self._cost.of(num_rows)

    def _pays(self, cost: Cost, gain: float, num_drafts: int, num_rows: int) -> bool:
        """Return True if `num_drafts` draft tokens increase tokens per second. `gain`: expected number of accepted tokens."""
        rate = (1 + gain * self._calibration / num_rows) / (1 + cost.any + cost.each * num_drafts)
        self.paid = num_drafts > 0 and rate >= WORTH_WHILE
        self._num_drafted += self.paid
        return self.paid

    # --- what is known --------------------------------------------------------------------------------------------

    def gain(self, num_rows: int) -> float:
        """Return the relative gain in tokens per second if all `num_rows` rows have draft tokens; 0 if they do not pay."""
        cost = None if self._cost is None else self._cost.of(num_rows)
        if cost is None:
            return 0.0
        row = Acceptance(self._chances)
        num = row.num_worth(cost.each * num_rows, self._most)
        rate = (1 + row.expected(num) * self._calibration) / (1 + cost.any + cost.each * num * num_rows)
        return rate - 1 if rate >= WORTH_WHILE else 0.0

    def steps_to_compute(self, num_tokens: int) -> float:
        """Return the assumed time to recompute `num_tokens` tokens, as a multiple of a one-row step's time; 0 without costs."""
        return 0.0 if self._cost is None else self._cost.draft_share * num_tokens

    def _row(self, sequence: Sequence) -> Acceptance:
        row = self._rows.get(sequence.number)
        if row is None:
            row = self._rows[sequence.number] = Acceptance(self._chances_of(sequence))
        return row

    def _chances_of(self, sequence: Sequence) -> Chances:
        return self._chances

    @property
    def _calibration(self) -> float:
        """Ratio of accepted to expected draft tokens. It is below 1, because drafts are chosen where estimates are too high."""
        return (self._were_right + _PRIOR) / (self._expected + _PRIOR)

    # --- afterwards -----------------------------------------------------------------------------------------------

    def settled(self, sequence: Sequence, num_drafts: int, token_ids: Several[int]) -> None:
        """Record that a step verified `num_drafts` draft tokens and produced `token_ids`, not yet added to the sequence."""
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

    def record_step(self, batch: ScheduledBatch, step_s: float) -> None:
        """Learn from the step of `batch`, which ended `step_s` seconds after the previous step. Steps with prompts or late
        masks are ignored."""
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
            num_drafts += row.num_tokens - 1  # with accepted tokens that are recomputed for recurrent states
        if batch.rows:
            self._cost.learn(len(batch.rows), num_drafts, step_s, followed=batch.follows)


class DeviceSpeculation(Speculation):
    """Speculative decoding with draft tokens that the device makes after a step (`runtime/runner/drafter.py`). The next step
    verifies all of them.

    The host chooses the number of draft tokens and gets their ids after verification, so steps are launched one ahead as usual.
    Costs are learned only from steps that both verify and make draft tokens, and from steps that do neither.

    The host's `proposer` drafts for sequences with matchers, whose masks need the ids. If `predictions`, it also drafts for
    sequences with a prediction. Its drafts continue ids that the host has, so the sequence skips steps until its ids in flight
    arrive. It does so only if that gains more than the one token lost. `rests`: see `Resting`."""

    on_device = True

    def __init__(
        self, proposer: Proposer, most: int, cost: VerificationCost | None = None, *, predictions: bool = False,
        rests: bool = False, longest: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(proposer, most, cost, longest=longest)
        self.rests = rests and cost is not None
        self._reads_predictions = predictions
        self._chances_on_host = Chances()

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

    def to_propose(
        self, could_draft: Several[tuple[Sequence, int]], num_rows: int, *, probes: bool = False
    ) -> dict[int, int]:
        """Return how many draft tokens to make after the next step, by sequence number. `could_draft`: (sequence, maximum number).

        `probes`: make some even if they do not pay, because device drafts are measured only when a step verifies them."""
        if self._cost is None:
            return {sequence.number: min(most, self._most) for sequence, most in could_draft}
        cost = self._cost_of(num_rows)
        if cost is None:
            return {}
        nums: dict[int, int] = {}
        gain, room = 0.0, self._room(num_rows)
        for sequence, most in could_draft[:PROBED_ROWS] if probes else could_draft:
            row, most = self._row(sequence), min(most, self._most, room)
            num = most if probes else row.num_worth(cost.each * num_rows, most)
            if not num and (sequence.number + self._num_asked) % LOOK_EVERY == 0:
                num = min(1, most)
            if num:
                nums[sequence.number] = num
                gain += row.expected(num)
                room -= num
        if not self._pays(cost, gain, sum(nums.values()), num_rows):
            return nums if probes else {}
        pauses = self._num_drafted % PLAIN_EVERY < 2  # two steps, so one neither verifies nor makes draft tokens
        return {} if pauses else nums

    def _chances_of(self, sequence: Sequence) -> Chances:
        return self._chances_on_host if self.is_on_host(sequence) else self._chances

    def _learn(self, sequence: Sequence, row: Acceptance, num_drafts: int, token_ids: Several[int]) -> None:
        if self.is_on_host(sequence):
            row.gained(token_ids)
        elif token_ids:
            row.checked(num_drafts, len(token_ids) - 1)

    def record_step(self, batch: ScheduledBatch, step_s: float) -> None:
        makes = any(row.num_proposed for row in batch.rows)
        checks = any(row.work.num_drafts for row in batch.rows if type(row.work) is Sample)
        if makes == checks:
            super().record_step(batch, step_s)
