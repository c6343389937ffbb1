"""Resting: pauses a draft model or head while draft tokens do not pay, and records the tokens that it has not computed.

A draft model or head must compute every token of the model before it can draft; this is called *following* a step. If draft tokens
do not pay, following only costs time. After some unprofitable steps of a size, the drafter therefore rests in steps of that size,
which then cost the same as without speculation. Since texts change, it follows again for a while after each rest, and rests grow
longer. Some of these steps verify a few draft tokens even if they do not pay, to measure whether they would.

After a rest, a sequence lacks draft KV of some tokens, and gets no draft tokens. The same holds for sequences that reuse its
blocks from the prefix cache; these blocks are recorded by id. When draft tokens pay again, a sequence may be recomputed from
its first missing token. This is done for one sequence at a time, after missing drafts have cost as much time, so it at most
doubles the loss. A prompt whose cached prefix lacks draft KV is computed from there. Both are limited to `_ANEW` tokens."""

from __future__ import annotations

from collections.abc import Sequence as Several

from runtime.batch import Sample
from runtime.sequence import Sequence
from runtime.speculate.speculation import Speculation

TRIED = 48  # steps without gain before a rest
_PAID = 2  # steps without gain that one step with gain cancels
_PROBED = range(16, 24)  # of each PROBE_EVERY steps without gain, those that verify some draft tokens
PROBE_EVERY = 256
RESTS = (1024, 2048, 4096, 8192)  # lengths of successive rests, in steps
_ANEW = 4096  # maximum number of recomputed tokens, since other requests wait


class _Size:
    """State of one step size. `num_refused`: steps that did not pay. `num_rests`: number of rests. `num_rested`: steps in the
    current rest."""

    def __init__(self) -> None:
        self.num_refused = self.num_rests = self.num_rested = 0


class Resting:
    """Controller of rests. `follows`: the drafter follows the step that is being scheduled if a row needs that. `is_followed`:
    at least one row of the step needs it."""

    def __init__(self, speculation: Speculation, block_size: int = 1) -> None:
        self._speculation = speculation
        self._block_size = block_size
        self._sizes: dict[int, _Size] = {}  # by bit length of the number of rows
        self._blocks: set[int] = set()
        self._num_running = 0
        self._some_lack = False  # whether some sequence may lack draft KV
        self._missed = 0.0  # steps that draft tokens would have saved since a sequence was last recomputed
        self.follows = self.is_followed = True

    # --- sizes ----------------------------------------------------------------------------------------------------

    def follows_size(self, num_rows: int) -> bool:
        """Return True if the drafter follows the next step, which has `num_rows` rows."""
        size = self._size(num_rows)
        if not self._speculation.rests or size.num_refused < TRIED:
            return True
        size.num_rested += 1
        if size.num_rested <= RESTS[min(size.num_rests, len(RESTS) - 1)]:
            return False
        size.num_refused = size.num_rested = 0
        size.num_rests += 1
        return True

    def probes(self, num_rows: int) -> bool:
        """Return True if the next step should make some draft tokens even if they do not pay, to measure their acceptance."""
        return not self._speculation.paid and self._size(num_rows).num_refused % PROBE_EVERY in _PROBED

    def note(self, num_rows: int, *, pays: bool) -> None:
        """Record whether draft tokens were expected to pay in a step of `num_rows` rows."""
        size = self._size(num_rows)
        size.num_refused = max(0, size.num_refused + (-_PAID if pays else 1))
        if not size.num_refused:
            size.num_rests = 0

    def _size(self, num_rows: int) -> _Size:
        return self._sizes.setdefault(num_rows.bit_length(), _Size())

    # --- a step ---------------------------------------------------------------------------------------------------

    def begin(self, num_running: int) -> None:
        """Begin to schedule a step, in which at most `num_running` sequences run."""
        self._num_running = num_running
        self.follows = self.follows_size(num_running)
        self.is_followed = False

    def advances(self, sequence: Sequence) -> None:
        """Record that the step being scheduled computes tokens of `sequence`."""
        if sequence.first_unfollowed >= 0:
            return
        if self.follows:
            self.is_followed = self.is_followed or self._may_have_drafts(sequence)
        else:  # from its computed tokens on, or earlier if draft tokens in flight are rejected
            sequence.first_unfollowed = sequence.num_computed_tokens - sequence.num_in_flight
            self._some_lack = True

    def to_compute_anew(self, running: Several[Sequence]) -> Sequence | None:
        """Return a running sequence that lacks draft KV and is now worth recomputing, or None."""
        if not (self._some_lack and self.follows):
            return None
        lacking = [
            sequence for sequence in running if sequence.first_unfollowed >= 0 and self._may_have_drafts(sequence)
        ]
        self._some_lack = bool(lacking)
        if not lacking or (gain := self._speculation.gain(len(running))) <= 0:
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

    def remember(self, block_ids: Several[int]) -> None:
        """Record that the prefix-cache blocks `block_ids` lack draft KV of some tokens."""
        self._blocks.update(block_ids)

    def forget(self, block_ids: Several[int]) -> None:
        """Record that `block_ids` were reallocated, so they no longer count as lacking draft KV."""
        if self._blocks:
            self._blocks.difference_update(block_ids)

    def among(self, block_ids: Several[int]) -> list[int]:
        """Return the blocks among `block_ids` that lack draft KV."""
        return [block_id for block_id in block_ids if block_id in self._blocks] if self._blocks else []

    def first_of(self, num_entries: int, ids: Several[Several[int]], widths: Several[int]) -> int:
        """Return the first token without draft KV in a cached prefix of `num_entries` entries, or -1. `ids`: for each layer
        group, block ids of the prefix's last entries. `widths`: for each layer group, number of blocks of an entry."""
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
        """Return True if a starting sequence should recompute its cached prefix from token `first_unfollowed` on."""
        if not self.follows or not self._may_have_drafts(sequence):
            return False
        return sequence.num_tokens - first_unfollowed <= _ANEW and self._speculation.gain(self._num_running + 1) > 0

    def _may_have_drafts(self, sequence: Sequence) -> bool:
        samples = isinstance(sequence.work, Sample)
        return samples and sequence.takes_drafts and not self._speculation.is_on_host(sequence)
