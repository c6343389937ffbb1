"""Scheduling of draft tokens: selects the sequences that verify draft tokens in a step, and those that get new ones after it.

Draft tokens from the host continue known ids. If such a sequence has ids in flight, its next step waits for them; steps without
draft tokens are scheduled one ahead as usual. Draft tokens from the device need no wait: a row states their number and has
blocks for them, and the next step verifies them without the host. `Resting` decides after which steps the device drafts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import replace

from runtime.api import Metric
from runtime.batch import ON_DEVICE, Sample, ScheduledBatch, ScheduledRow
from runtime.feature import Claim, Feature, Scheduling
from runtime.kv import states
from runtime.kv.block_pool import BlockIds
from runtime.kv.prefix_cache import Match
from runtime.metrics.stats import counter
from runtime.policy.step_policy import StepPlan
from runtime.sequence import Sequence
from runtime.speculate.resting import Resting
from runtime.speculate.speculation import Speculation


class DraftScheduling(Feature):
    """Scheduling feature for draft tokens. `speculation`: chooses the draft tokens, or only their number."""

    looks_ahead = True

    def __init__(self, speculation: Speculation) -> None:
        self.speculation = speculation
        self.num_computed_anew = 0  # sequences recomputed to restore their draft KV
        self._reported = 0, 0, 0  # drafts, their tokens and accepted tokens at the last log line
        self.drafts: dict[int, tuple[int, ...]] = {}  # of this step, by sequence number
        self.to_propose: dict[int, int] = {}  # number of draft tokens to make after this step, by sequence number

    def connect(self, scheduler: Scheduling) -> None:
        self.scheduler = scheduler
        self.resting = Resting(self.speculation, scheduler.blocks.cache.entry_size)
        scheduler.blocks.when_allocated.append(self.resting.forget)
        self.widths = [group.width for group in scheduler.blocks.cache.groups]
        self.has_states = states.has_states(scheduler.blocks)

    def claim(self, sequence: Sequence) -> Claim:
        return _Drafts(self, sequence)

    # --- a step ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Decide whether the drafter follows the next step. If it does and no request waits, one sequence that lacks draft KV
        may be recomputed."""
        if not self.speculation.on_device:
            return
        running = self.scheduler.running
        self.resting.begin(len(running))
        if not self.scheduler.waiting and (sequence := self.resting.to_compute_anew(running)) is not None:
            self.scheduler.sequences.suspend(sequence)
            self.num_computed_anew += 1

    def extend(self, wanted: list[int], plan: StepPlan) -> bool:
        found = self._find(wanted, plan.extra_room) if plan.num_decodes else {}
        self.drafts = found or {}
        if found is None:
            return False
        if self.speculation.on_device:
            self.to_propose = self._proposals(wanted, found) if self.resting.follows else {}
        return True

    @property
    def is_busy(self) -> bool:
        return bool(self.drafts) or self.speculation.on_device

    def _find(self, wanted: list[int], room: int) -> dict[int, tuple[int, ...]] | None:
        """Return the host's draft tokens of decodes by sequence number, at most `room` in total. Return None if a sequence must
        wait for its ids in flight. With drafts on the device, only its entry of `wanted` is then set to 0 instead."""
        running = self.scheduler.running
        most, could_draft = self.scheduler.limits.max_num_batched_tokens, []
        for sequence, num_wanted in zip(running, wanted, strict=True):
            if (num_wanted == 1 or sequence.rewound_to >= 0) and num_wanted and self._takes_drafts(sequence):
                # No step computes beyond the last token. Recomputed tokens must fit in the budget too,
                # or a sliding window could lack blocks.
                num = min(sequence.max_tokens_total - sequence.num_tokens, most - sequence.num_in_flight) - 1
                if num > 0:
                    could_draft.append((sequence, num))
        guesses = self.speculation.guesses(could_draft, len(wanted)) if could_draft else {}
        drafts: dict[int, tuple[int, ...]] = {}
        waiting: set[int] = set()
        for sequence, _ in could_draft:
            draft_ids = guesses.get(sequence.number, ())[: max(0, room)]
            if not draft_ids:
                continue
            if sequence.num_in_flight and draft_ids[0] != ON_DEVICE:
                if not self.speculation.on_device:
                    return None
                waiting.add(sequence.number)
                continue
            drafts[sequence.number] = draft_ids
            room -= len(draft_ids)
        if waiting:
            for index, sequence in enumerate(running):
                if sequence.number in waiting:
                    wanted[index] = 0
        return drafts

    def _takes_drafts(self, sequence: Sequence) -> bool:
        """Return True if the sequence may have draft tokens. With recurrent states and masks it may not, because a late mask
        drops draft tokens that the states already include."""
        return sequence.takes_drafts and not (self.has_states and sequence.has_matchers)

    def _proposals(self, wanted: Several[int], drafts: Mapping[int, Several[int]]) -> dict[int, int]:
        """Return how many draft tokens the device makes after the step, by sequence number. `drafts`: those to verify in it.

        Sequences whose draft tokens must be on the host get none: their masks would depend on ids that are on the device."""
        most, could_draft = self.scheduler.limits.max_num_batched_tokens, []
        for sequence, num_wanted in zip(self.scheduler.running, wanted, strict=True):
            decodes = num_wanted == 1 or (num_wanted and sequence.rewound_to >= 0)
            may_have = sequence.takes_drafts and sequence.first_unfollowed < 0
            if decodes and may_have and not self.speculation.is_on_host(sequence):
                num_new = 1 + len(drafts.get(sequence.number, ()))
                left = sequence.max_tokens_total - sequence.num_tokens, most - sequence.num_in_flight
                if (num := min(left) - num_new - 1) > 0:
                    could_draft.append((sequence, num))
        if not could_draft:
            return {}
        num_rows = len(wanted)
        probes = self.resting.probes(num_rows)
        nums = self.speculation.to_propose(could_draft, num_rows, probes=probes)
        self.resting.note(num_rows, pays=self.speculation.paid and not probes)
        return nums

    def decided(self, rows: Several[ScheduledRow]) -> None:
        """Record that all rows of a step lack draft KV of its tokens, if the drafter does not follow the step."""
        if not self.resting.follows or self.resting.is_followed:
            return
        starts = {row.number: row.start for row in rows}
        for sequence in self.scheduler.running:
            for claim in sequence.claims if sequence.number in starts else ():
                if isinstance(claim, _Drafts):
                    claim.lacks_from(starts[sequence.number])

    def complete(self, batch: ScheduledBatch) -> ScheduledBatch:
        return batch if self.resting.is_followed else replace(batch, follows=False)

    # --- afterwards -----------------------------------------------------------------------------------------------

    def record_step(self, batch: ScheduledBatch, step_s: float) -> None:
        self.speculation.record_step(batch, step_s)

    def metrics(self) -> list[Metric]:
        speculation = self.speculation
        return [
            counter("spec_decode_num_drafts", "Times that tokens of a sequence were guessed.", speculation.num_drafts),
            counter(
                "spec_decode_num_draft_tokens", "Guessed tokens that steps have checked.", speculation.num_draft_tokens
            ),
            counter(
                "spec_decode_num_accepted_tokens", "Guessed tokens that were right.", speculation.num_accepted_tokens
            ),
            counter(
                "spec_decode_num_computed_anew",
                "Sequences computed anew, so that tokens of them could be guessed again.",
                self.num_computed_anew,
            ),
            Metric(
                "spec_decode_num_accepted_tokens_per_pos",
                "Guessed tokens that were right, by their place in the guess.",
                "counter",
                {(("position", str(place)),): float(num) for place, num in enumerate(speculation.num_accepted_at)},
            ),
        ]

    def progress(self) -> str:
        now = self.speculation.num_drafts, self.speculation.num_draft_tokens, self.speculation.num_accepted_tokens
        drafts, tokens, accepted = (new - old for new, old in zip(now, self._reported, strict=True))
        self._reported = now
        return f", drafts of {tokens / drafts:.1f} tokens accepted {100.0 * accepted / tokens:.0f} %" if drafts else ""


class _Drafts(Claim):
    """Hooks for a sequence with draft tokens. `copy`: copy of its recurrent states while a step verifies draft tokens."""

    __slots__ = ("_feature", "_found", "_sequence", "_speculation", "_stale", "copy")
    learns = True

    def __init__(self, feature: DraftScheduling, sequence: Sequence) -> None:
        self._feature = feature
        self._speculation = feature.speculation
        self._sequence = sequence
        self.copy: states.StateCopy | None = None
        self._found = -1  # first token without draft KV in its cached prefix
        self._stale: Several[BlockIds] = ()  # cached blocks that it recomputes

    # --- it starts ------------------------------------------------------------------------------------------------

    def reuses(self, match: Match) -> int:
        resting, cache = self._feature.resting, self._feature.scheduler.blocks.cache
        num_entries = -(-match.num_entries * cache.block_size // cache.entry_size)
        self._found, self._stale = resting.first_of(num_entries, match.ids, self._feature.widths), ()
        if self._found < 0 or not resting.is_computed_anew(self._sequence, self._found):
            return match.num_entries
        num_entries, self._found, self._stale = self._found // cache.block_size, -1, match.ids
        return num_entries

    def started(self) -> None:
        self._sequence.first_unfollowed = self._found
        for block_ids in self._stale:
            self._feature.scheduler.blocks.cache.forget(self._feature.resting.among(block_ids))
        self._stale = ()

    # --- it runs --------------------------------------------------------------------------------------------------

    def extra_ids(self, num_tokens: int) -> tuple[int, ...]:
        draft_ids = self._feature.drafts.get(self._sequence.number, ())
        return draft_ids if draft_ids and self._has_blocks(num_tokens + len(draft_ids)) else ()

    def _has_blocks(self, num_tokens: int) -> bool:
        """Return True if the free blocks suffice for `num_tokens` more tokens and a copy of the recurrent states."""
        blocks = self._feature.scheduler.blocks
        missing = blocks.num_missing(self._sequence, self._sequence.num_computed_tokens + num_tokens)
        if self._feature.has_states:
            missing += states.num_state_blocks(self._sequence)
        return missing <= blocks.pool.num_free

    def scheduled(self, row: ScheduledRow) -> ScheduledRow:
        feature, sequence = self._feature, self._sequence
        if row.draft_ids and feature.has_states:
            self.copy = states.keep(feature.scheduler.blocks, sequence)
        num = feature.to_propose.pop(sequence.number, 0) if type(row.work) is Sample else 0
        if num and row.end + num > sequence.num_slots:
            if self._has_blocks(row.num_tokens + num):
                feature.scheduler.blocks.extend(sequence, row.end + num)
            else:
                num = 0
        sequence.num_proposed = num
        if feature.speculation.on_device:
            feature.resting.advances(sequence)
        return row._replace(num_proposed=num) if num else row

    def lacks_from(self, start: int) -> None:
        """Record that draft KV is missing from token `start` on, or earlier if draft tokens in flight are rejected."""
        if self._sequence.first_unfollowed < 0:
            self._sequence.first_unfollowed = max(0, start - self._sequence.num_in_flight)
            self.registered(0)

    def registered(self, first_entry: int) -> None:
        """Record which prefix-cache entries of the sequence, from number `first_entry` on, lack draft KV of some tokens."""
        sequence, cache = self._sequence, self._feature.scheduler.blocks.cache
        if sequence.first_unfollowed < 0:
            return
        for table in sequence.tables:
            per = cache.entry_blocks(table.group)
            first = max(first_entry // per, table.first_entry, sequence.first_unfollowed // (per * cache.block_size))
            end = sequence.num_registered_blocks // per if table.group.kind.grows else 0
            self._feature.resting.remember(table.entry_ids(first, max(first, end)))

    def settled(self, num_extra: int, token_ids: Several[int]) -> None:
        self._speculation.settled(self._sequence, num_extra, token_ids)
        if num_extra and self.copy is not None and len(token_ids) == 1 + num_extra:
            self._drop_copy()  # without draft tokens the copy would be one step behind

    def rewinds(self) -> bool:
        if self.copy is None:
            return False
        states.go_back(self._feature.scheduler.blocks, self._sequence, self.copy)
        self.copy = None
        return True

    # --- it ends --------------------------------------------------------------------------------------------------

    def suspended(self) -> None:
        self._drop_copy()
        self._sequence.num_proposed = 0
        self._sequence.first_unfollowed = -1

    def finished(self) -> None:
        self._speculation.finished(self._sequence)

    def _drop_copy(self) -> None:
        if self.copy is not None:
            states.drop(self._feature.scheduler.blocks, self._sequence, self.copy)
            self.copy = None
