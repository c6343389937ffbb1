"""Sequences that have not finished: waiting sequences, and running sequences with a row and blocks."""

from __future__ import annotations

from bisect import insort

from runtime.api import FinishReason
from runtime.kv.sequence_blocks import SequenceBlocks
from runtime.policy.fairness import Policy
from runtime.sequence import Sequence, SequenceStatus


class Sequences:
    """Waiting and running sequences, in the policy's order, and the free rows of the device tables. The lists `waiting` and
    `running` are changed in place and never replaced."""

    def __init__(self, num_rows: int, blocks: SequenceBlocks, policy: Policy) -> None:
        self._blocks = blocks
        self._policy = policy
        self._by_number: dict[int, Sequence] = {}
        self.find = self._by_number.get  # returns a sequence by its number, None if it has finished
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self._by_number[sequence.number] = sequence
        self._wait(sequence)

    def start(self, sequence: Sequence) -> None:
        """Move `sequence` from `waiting` to `running` and assign it a row. Its blocks have been reserved."""
        self.waiting.remove(sequence)
        self._policy.starts(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.row = self.free_rows.pop()
        sequence.needs_bind = True
        for claim in sequence.claims:
            claim.started()
        insort(self.running, sequence, key=self._policy.order)

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to the waiting queue because its blocks are needed. Counted as a preemption."""
        self.suspend(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def suspend(self, sequence: Sequence) -> None:
        """Move a running sequence back to the waiting queue to be recomputed later. Its sampled ids in flight are kept."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.is_resumed = True
        self._wait(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a waiting or running sequence. Its row and blocks are free when this returns."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        self._policy.ends(sequence)
        for claim in sequence.claims:
            claim.finished()
        sequence.claims = ()
        sequence.status = SequenceStatus.FINISHED
        sequence.finish = reason
        self._by_number.pop(sequence.number, None)

    def _wait(self, sequence: Sequence) -> None:
        self._policy.waits(sequence)
        insort(self.waiting, sequence, key=self._policy.order)

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self.free_rows.append(sequence.row)
        sequence.row = None
        for claim in sequence.claims:
            claim.suspended()
        self._blocks.give_back(sequence)
        sequence.num_computed_tokens = 0
        sequence.rewound_to = -1
