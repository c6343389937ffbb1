"""Scheduler: decides the rows of each step and returns them as plain data. Uses no torch, clock or I/O.

There is no prefill phase and no decode phase. In every step each sequence computes tokens that are known but not yet computed,
within one token budget. Counts advance when a step is scheduled, so `schedule` can run ahead of the device. `settle` records the
sampled ids, drops ids of sequences that have ended, and corrects the counts.

A row with draft tokens is counted as if all of them were accepted: blocks, positions and ids in flight are reserved for the
maximum. Until the results are on the host, only the device has the exact position of later rows; such rows state the maximum.
`settle` subtracts rejected draft tokens from the sequence's counts. The sequence keeps the surplus blocks for its next tokens.
Only known tokens are offered to the prefix cache. Everything else that affects a step is a `Feature`; no feature is named here.

Why it cannot deadlock: if blocks are missing, running sequences are preempted from the end of the policy's order. The first
sequence therefore keeps its blocks, and the pool holds at least one sequence of maximum length. Decodes are served in that order,
and before prompts. If a decode needs blocks that rows of this step hold, it waits, and no sequence starts meanwhile. All blocks of
a prompt are reserved when it starts.

Why blocks may be freed while a launched step still uses them: steps execute in launch order, so the next owner writes after
that step. The same holds for sliding windows: before its next step is scheduled, a sequence releases blocks that neither this
step nor later steps read, however many draft tokens in flight are accepted."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from runtime.api import FinishReason, Request
from runtime.batch import NOT_FINITE, ScheduledBatch, ScheduledRow
from runtime.feature import Feature
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.kv.sequence_blocks import SequenceBlocks
from runtime.policy.fairness import Policy
from runtime.policy.step_budget import FixedBudget, StepBudget
from runtime.policy.step_policy import Queues, StepPolicy
from runtime.scheduling import settling
from runtime.scheduling.rows import plain_row, row_of
from runtime.scheduling.sequences import Sequences
from runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of scheduling. `max_num_seqs`: number of rows of the device tables. `max_num_batched_tokens`: maximum tokens of a
    step; more than `max_num_seqs`, so that prompts advance even if all rows decode. `in_one_step`: prompts are never split, so
    a prompt longer than a step must not be added."""

    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int]
    in_one_step: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.max_num_seqs < self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be above max_num_seqs ({self.max_num_seqs})"
            )


@dataclass(slots=True)
class _NewStep:
    """A step that is being scheduled. `budget`: number of tokens that may still be added. `num_plain`: number of `rows` that
    compute one token and sample the next."""

    budget: int
    rows: list[ScheduledRow] = field(default_factory=list)
    num_plain: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_plain if self.num_plain == len(self.rows) else sum([row.num_tokens for row in self.rows])


class Scheduler:
    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, cache: PrefixCache, policy: Policy, *,
        step_budget: StepBudget | None = None, features: Several[Feature] = (),
    ) -> None:  # fmt: skip
        """Create a scheduler. `step_budget`: limit of prompt tokens in steps with decodes, or None for the limit of every step
        (`max_num_batched_tokens`)."""
        self.limits = limits
        self.policy = policy
        self.blocks = SequenceBlocks(pool, cache)
        self.step_policy = StepPolicy(step_budget or FixedBudget(None), limits.max_num_batched_tokens)
        self.sequences = Sequences(limits.max_num_seqs, self.blocks, policy)
        self.waiting, self.running = self.sequences.waiting, self.sequences.running
        self.features = [*features]
        for feature in features:
            feature.connect(self)

    # --- called by the engine -------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        params = sequence.sampling
        eos_token_ids = frozenset() if params.ignore_eos else self.limits.eos_token_ids
        sequence.ending_ids = params.stop_token_ids | eos_token_ids | {NOT_FINITE}
        sequence.claims = tuple([claim for each in self.features if (claim := each.claim(sequence)) is not None])
        sequence.learns = any(claim.learns for claim in sequence.claims)
        self.sequences.add(sequence)

    def schedule(self) -> ScheduledBatch | None:
        """Return the next step. None if no sequence can advance, or if results of steps in flight are required first."""
        batch = self._next_step()
        if batch is None and any(feature.relaxes() for feature in self.features):
            return self._next_step()
        return batch

    def settle(
        self, batch: ScheduledBatch, tokens: Several[list[int]], pooled: Several[memoryview | None] = ()
    ) -> list[settling.Settled]:
        """Record `tokens` of the sampling rows and `pooled` of the pooling rows of `batch`. Return one Settled per sequence."""
        self.blocks.copies.release(batch.copies)
        for feature in self.features:
            feature.settled(batch)
        return settling.settle(self.sequences, batch, tokens, pooled)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End `sequence` now. Its row and blocks are free when this returns."""
        self.sequences.finish(sequence, reason)

    def forget_step(self, batches: Several[ScheduledBatch]) -> None:
        """Preempt all running sequences and clear the prefix cache, because `batches` did not run. The KV entries that they
        should have written are invalid."""
        for batch in batches:
            self.blocks.copies.release(batch.copies)
            settling.forget(self.sequences, batch)
        for sequence in list(self.running):  # they may share blocks with sequences of `batches`
            self.sequences.preempt(sequence)
        self.blocks.cache.clear()
        for batch in batches:
            for feature in self.features:
                feature.forget(batch)

    def check(self, request: Request) -> None:
        for feature in self.features:
            feature.check(request)

    def learn(self, batch: ScheduledBatch, took_s: float, since_s: float) -> None:
        """Record the times of `batch`: it ran for `took_s` seconds and ended `since_s` seconds after the previous step's end."""
        if not any(feature.slows_steps for feature in self.features):
            self.step_policy.budget.settled(batch, took_s)
        for feature in self.features:
            feature.record_step(batch, since_s)

    def decide_after_s(self, batch: ScheduledBatch) -> float:
        """Return the delay, in seconds after the start of `batch`, at which the next step should be scheduled."""
        return self.step_policy.budget.decide_after_s(batch)

    @property
    def load(self) -> float:
        """Load of the engine: sequences as a fraction of the rows, plus KV blocks in use as a fraction of all; 0 if idle."""
        num = len(self.running) + len(self.waiting)
        return num / self.limits.max_num_seqs + self.blocks.pool.usage

    def clear(self) -> None:
        self.blocks.cache.clear()
        for feature in self.features:
            feature.clear()

    # --- a step ---------------------------------------------------------------------------------------------------

    def _next_step(self) -> ScheduledBatch | None:
        features = self.features
        for feature in features:
            feature.begin()
        preemptions_before = self.sequences.num_preemptions
        # Tokens between the computed and the known or in-flight ones; 0 if the sequence needs no more.
        wanted = [
            num_tokens - sequence.num_computed_tokens
            if (num_tokens := sequence.num_known_tokens + sequence.num_in_flight) < sequence.max_tokens_total
            and not sequence.is_paused
            else 0
            for sequence in self.running
        ]
        for feature in features:
            feature.share(wanted)
        queues = Queues(self.running, wanted, self.waiting, len(self.sequences.free_rows), self.blocks.hit_share)
        plan = self.step_policy.plan(queues)
        for feature in features:
            if not feature.extend(wanted, plan):
                return None
        step = _NewStep(plan.budget)
        prompts = self._decode(step, wanted)
        if prompts or self.waiting:
            for feature in features:
                feature.admits()
            may_start = self.sequences.num_preemptions == preemptions_before
            self._compute_prompts(step, prompts, plan.scored_cost, may_start=may_start)
        for feature in features:
            feature.decided(step.rows)
        copies = self.blocks.copies.take()
        if not step.rows and not copies and not any(feature.has_work for feature in features):
            return None
        num_preempted = self.sequences.num_preemptions - preemptions_before
        decodes_only = step.num_plain == len(step.rows)
        batch = ScheduledBatch(tuple(step.rows), step.num_tokens, num_preempted, copies, decodes_only=decodes_only)
        for feature in features:
            batch = feature.complete(batch)
        return batch

    def _decode(self, step: _NewStep, wanted: Several[int]) -> list[Sequence]:
        """Add a row for each running sequence that decodes. `wanted`: number of tokens to compute for each running sequence.
        Return the running sequences whose prompts are not fully computed."""
        prompts: list[Sequence] = []
        blocks, rows, running, num_plain, budget = self.blocks, step.rows, self.running, 0, step.budget
        moves, busy = blocks.has_windows, any(feature.is_busy for feature in self.features)
        for index, num_wanted in enumerate(wanted):
            if index == len(running):
                break  # the rest was preempted
            if not num_wanted:
                continue
            sequence = running[index]
            if num_wanted == 1 and not (moves or (busy and sequence.claims)):
                row = plain_row(sequence, blocks)
                if row is not None:
                    rows.append(row)
                    num_plain += 1
                    budget -= 1
                    continue
            if num_wanted != 1 and (sequence.rewound_to < 0 or num_wanted > budget - len(running) + index):
                prompts.append(sequence)
                continue
            if sequence.claims and not self._reach(step, sequence, 1):
                continue  # the last token of a prompt may need another feature
            extra_ids: tuple[int, ...] = ()
            for claim in sequence.claims:
                extra_ids = extra_ids or claim.extra_ids(num_wanted)
            num_tokens = num_wanted + len(extra_ids)
            if not self._grow(step, sequence, sequence.num_computed_tokens + num_tokens):
                break  # the sequence was last in order and preempted itself
            rows.append(row_of(sequence, blocks, num_tokens, extra_ids))
            budget -= num_tokens
        step.num_plain, step.budget = num_plain, budget
        return prompts

    # --- prompts --------------------------------------------------------------------------------------------------

    def _compute_prompts(self, step: _NewStep, prompts: list[Sequence], scored_cost: int, *, may_start: bool) -> None:
        """Add rows for the running `prompts` and for waiting sequences, in the policy's order, until the budget is used. If the
        next waiting sequence does not fit, no other starts, so none starves. `scored_cost`: budget of a token with logprobs."""
        policy, ending_cost = self.policy, self.step_policy.budget.ending_cost
        prompts = [sequence for sequence in prompts if sequence.row is not None]  # the others were preempted
        while step.budget > 0:
            candidate = self._next_waiting() if may_start else None
            if prompts:
                index = policy.next_prompt(prompts)
                if candidate is None or not policy.overtakes(candidate, prompts[index]):
                    sequence = prompts.pop(index)
                    cost = scored_cost if sequence.scores_prompt else 1
                    num_wanted = sequence.num_tokens - sequence.num_computed_tokens
                    num_tokens = self._reach(step, sequence, min(num_wanted, step.budget // cost))
                    if num_tokens and self._grow(step, sequence, sequence.num_computed_tokens + num_tokens):
                        self._compute(step, sequence, num_tokens, cost)
                        step.budget -= ending_cost if num_tokens == num_wanted else 0
                    elif num_tokens:
                        may_start = False  # there are too few blocks even for running sequences
                    continue
            if candidate is None:
                return
            cost = scored_cost if candidate.scores_prompt else 1
            least = cost * (candidate.num_tokens if self.limits.in_one_step else 1)
            longest, num_running = self.limits.max_num_batched_tokens, len(self.running)
            if step.budget >= least and self.blocks.reserve(candidate, num_running, longest):
                self._start(step, candidate, cost)
                if candidate.num_computed_tokens == candidate.num_known_tokens:
                    step.budget -= ending_cost
            elif prompts:
                may_start = False
            else:
                return

    def _next_waiting(self) -> Sequence | None:
        """Return the waiting sequence that may start next, or None. A preempted sequence whose last sampled id is still on the
        device cannot start."""
        if not self.waiting or not self.sequences.free_rows:
            return None
        sequence = self.waiting[self.policy.next_waiting(self.waiting)]
        if sequence.claims and not _may_start(sequence):
            others = list(filter(_may_start, self.waiting))
            if not others:
                return None
            sequence = others[self.policy.next_prompt(others)]
        return None if sequence.num_in_flight else sequence

    def _start(self, step: _NewStep, sequence: Sequence, cost: int) -> None:
        """Start a waiting sequence whose blocks have been reserved. Compute as many of its tokens as fit; each costs `cost`."""
        self.sequences.start(sequence)
        num_wanted = sequence.num_tokens - sequence.num_computed_tokens
        num_tokens = self._reach(step, sequence, min(num_wanted, step.budget // cost))
        self.blocks.extend(sequence, sequence.num_computed_tokens + num_tokens)
        if num_tokens:  # otherwise it has a row and continues in a later step
            self._compute(step, sequence, num_tokens, cost)

    def _compute(self, step: _NewStep, sequence: Sequence, num_tokens: int, cost: int) -> None:
        """Add a row for the next `num_tokens` tokens of a prompt. Each reduces the budget by `cost`."""
        step.rows.append(row_of(sequence, self.blocks, num_tokens))
        step.budget -= num_tokens * cost
        self.policy.computes(sequence, num_tokens)

    def _reach(self, step: _NewStep, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the sequence's next `num_tokens` this step may compute."""
        for claim in sequence.claims if num_tokens else ():
            num_tokens = claim.reach(num_tokens, self.limits.max_num_batched_tokens - step.num_tokens)
        return num_tokens

    # --- blocks ---------------------------------------------------------------------------------------------------

    def _grow(self, step: _NewStep, sequence: Sequence, end: int) -> bool:
        """Allocate blocks for the tokens of `sequence` up to `end`. If blocks are missing, preempt the last running sequences,
        but none in this step. Return False if blocks are still missing; `sequence` may then be preempted itself."""
        if self.blocks.has_windows:
            self.blocks.release_out_of_window(sequence)
        if end > sequence.num_slots:
            missing = self.blocks.num_missing(sequence, end)
            while self.blocks.pool.num_free < missing:
                victim = self.running[-1]
                if any(row.number == victim.number for row in step.rows):
                    return False
                self.sequences.preempt(victim)
                if victim is sequence:
                    return False
            self.blocks.extend(sequence, end)
        return True


def _may_start(sequence: Sequence) -> bool:
    return all(claim.may_start() for claim in sequence.claims)
