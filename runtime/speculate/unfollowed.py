"""Unfollowed tokens: those of steps that what makes drafts has not computed (`Following`): it has no keys and values of them.

A sequence that has some has no drafts, or they would be guessed of half a text. Nor has one that finds their blocks in the prefix
cache; blocks are known by their ids here until they are handed out anew. Once drafts pay again, one may be computed anew, prompt
and answer, from its first such token on: one at a time, and only when steps without drafts have cost as much as that takes, so
both together are never more than twice what had to be paid. A prompt whose prefix is cached is computed from there as if it were
not: once, since the new blocks take the old ones' names. Neither where that is more than `_ANEW` tokens."""

from __future__ import annotations

from collections.abc import Sequence as Several

from runtime.batch import Sample
from runtime.sequence import Sequence
from runtime.speculate.speculation import Speculation

_ANEW = 4096  # tokens, which others wait for


class UnfollowedTokens:
    """`follows`: whether the step in the making is followed for the sake of rows that may have drafts and all of whose tokens were;
    `is_followed`: whether it has any."""

    def __init__(self, speculation: Speculation | None, block_size: int) -> None:
        self._speculation = speculation
        self._block_size = block_size
        self._blocks: set[int] = set()
        self.follows = True
        self._num_running = 0
        self._some_lack = False  # perhaps
        self._missed = 0.0  # steps that drafts would have saved since one was computed anew
        self.is_followed = True

    # --- a step ---------------------------------------------------------------------------------------------------

    def begin(self, num_running: int) -> None:
        """The next step is in the making, of so many sequences and perhaps more; drafts come from the device."""
        assert self._speculation is not None
        self._num_running = num_running
        self.follows = self._speculation.follows(num_running)
        self.is_followed = False

    def advances(self, sequence: Sequence) -> None:
        """The step computes tokens of it, from its `num_computed_tokens` on, or from before that as far as drafts in flight are
        wrong."""
        if sequence.first_unfollowed >= 0:
            return
        if self.follows:
            self.is_followed = self.is_followed or self._may_have_drafts(sequence)
        else:
            sequence.first_unfollowed = sequence.num_computed_tokens - sequence.num_in_flight
            self._some_lack = True

    def to_compute_anew(self, running: Several[Sequence]) -> Sequence | None:
        """One of them for whom that is worth while by now."""
        if not (self._some_lack and self.follows) or self._speculation is None:
            return None
        lacking = [
            sequence for sequence in running if sequence.first_unfollowed >= 0 and self._may_have_drafts(sequence)
        ]
        self._some_lack = bool(lacking)
        if (gain := self._speculation.gain(len(running))) <= 0 or not lacking:
            return None
        self._missed += gain * len(lacking) / len(running)
        for sequence in lacking:
            num_anew = sequence.num_tokens - sequence.first_unfollowed
            steps = self._speculation.steps_to_compute(num_anew)
            left = sequence.max_tokens_total - sequence.num_tokens
            if num_anew <= _ANEW and steps <= self._missed and steps * len(running) < gain * left:
                self._missed = 0.0
                return sequence
        return None

    # --- the prefix cache -----------------------------------------------------------------------------------------

    def note(self, block_ids: Several[int]) -> None:
        """These have such tokens, and are known to the prefix cache."""
        self._blocks.update(block_ids)

    def forget(self, block_ids: Several[int]) -> None:
        """They have been handed out anew."""
        if self._blocks:
            self._blocks.difference_update(block_ids)

    def among(self, block_ids: Several[int]) -> list[int]:
        """Which of them have such tokens."""
        return [block_id for block_id in block_ids if block_id in self._blocks] if self._blocks else []

    def first_of(self, num_entries: int, ids: Several[Several[int]], widths: Several[int]) -> int:
        """The first such token of a prefix of so many entries, -1 if there is none. `ids`: of its last entries, for each group
        of layers, which has so many to one."""
        if not self._blocks:
            return -1
        found = []
        for block_ids, width in zip(ids, widths, strict=True):
            first_entry = num_entries - len(block_ids) // width
            place = next((place for place, block_id in enumerate(block_ids) if block_id in self._blocks), None)
            if place is not None:
                found.append(first_entry + place // width)
        return min(found) * self._block_size if found else -1

    def is_computed_anew(self, sequence: Sequence, first_unfollowed: int) -> bool:
        """Whether a sequence that starts computes a cached prefix from there on itself."""
        if self._speculation is None or not self.follows or not self._may_have_drafts(sequence):
            return False
        return sequence.num_tokens - first_unfollowed <= _ANEW and self._speculation.gain(self._num_running + 1) > 0

    def _may_have_drafts(self, sequence: Sequence) -> bool:
        assert self._speculation is not None
        samples = isinstance(sequence.work, Sample)
        return samples and sequence.takes_drafts and not self._speculation.is_on_host(sequence)
